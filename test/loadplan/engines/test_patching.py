"""Apply and revert on copies of the released engine's own files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from engine_tree import LOADER, PRISTINE, TARGET, make_tree, snapshot

from loadplan.engines import apply as patching
from loadplan.engines import targets
from loadplan.engines import tree as trees
from loadplan.engines.apply import FileState
from loadplan.engines.series import Hunk, apply_hunks, read_series, reverse_hunks
from loadplan.errors import EngineError


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The touched files of the release, in the layout of an unpacked wheel."""
    return make_tree(tmp_path / "site-packages")


def apply(root: Path) -> int:
    return len(patching.apply(TARGET, root))


def revert(root: Path) -> int:
    return len(patching.revert(TARGET, root))


def states(root: Path) -> set[FileState]:
    return set(patching.file_states(TARGET, root).values())


def test_apply_and_revert_end_in_the_same_bytes(tree: Path) -> None:
    """Red when revert leaves a file behind or does not give the release's bytes."""
    before = snapshot(tree)
    assert states(tree) == {FileState.PRISTINE}
    # A receipt for each file, and RECORD.
    assert apply(tree) == 2 * (len(TARGET.files) + len(TARGET.new_files())) + 1
    assert states(tree) == {FileState.PATCHED}
    assert apply(tree) == 0
    revert(tree)
    assert snapshot(tree) == before
    assert revert(tree) == 0
    assert not (tree / TARGET.core_folder).exists()


def test_tree_that_an_earlier_run_left_half_done_converges(tree: Path) -> None:
    """Each file is judged by itself; red when a mixed tree is refused."""
    before = snapshot(tree)
    edits = patching.plan_apply(TARGET, tree)
    for done in range(len(edits)):
        trees.commit(tree, edits[done : done + 1])
        if done % 5 == 0:
            apply(tree)
            assert states(tree) == {FileState.PATCHED}
            revert(tree)
            trees.commit(tree, edits[: done + 1])
    assert states(tree) == {FileState.PATCHED}
    revert(tree)
    assert snapshot(tree) == before


@pytest.mark.parametrize("run", [apply, revert])
def test_unknown_file_stops_the_run_before_anything_is_written(tree: Path, run) -> None:
    """Red when a file that somebody changed is patched or overwritten."""
    with (tree / LOADER).open("a") as file:
        file.write("# mine\n")
    before = snapshot(tree)
    with pytest.raises(EngineError, match="loader.py: changed by something else"):
        run(tree)
    (tree / LOADER).unlink()
    with pytest.raises(EngineError, match="loader.py: no such file"):
        run(tree)
    before.pop(LOADER)
    assert snapshot(tree) == before


def test_write_that_fails_takes_the_earlier_ones_back(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the middle; red when half of the files stay patched."""
    before = snapshot(tree)
    replace, calls = os.replace, []

    def failing(source, destination):
        calls.append(destination)
        if len(calls) == 6:
            raise OSError(28, "No space left on device")
        return replace(source, destination)

    edits = patching.plan_apply(TARGET, tree)
    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(EngineError, match="No space left.*nothing was changed"):
        trees.commit(tree, edits)
    assert snapshot(tree) == before


def test_hard_links_modes_and_compiled_files(tree: Path) -> None:
    """uv links installations to its cache; red when the cache is written through."""
    loader = tree / LOADER
    loader.chmod(0o640)
    linked = tree.parent / "cache.py"
    os.link(loader, linked)
    content = loader.read_bytes()
    stale = loader.parent / "__pycache__" / "loader.cpython-312.pyc"
    stale.parent.mkdir()
    stale.write_bytes(b"stale")
    other = stale.with_name("loader_of_others.cpython-312.pyc")
    other.write_bytes(b"kept")
    apply(tree)
    assert linked.read_bytes() == content != loader.read_bytes()
    assert loader.stat().st_mode & 0o777 == 0o640
    assert not stale.exists()
    assert other.exists()


def test_patched_files_are_what_the_hashes_say(tree: Path) -> None:
    """Red when a patch is edited without its hash, or a hash without its patch."""
    apply(tree)
    for path, hashes in TARGET.files.items():
        assert patching.sha256((tree / path).read_bytes()) == hashes["patched"]
        assert patching.sha256((PRISTINE / path).read_bytes()) == hashes["pristine"]


def test_hunk_needs_its_lines_at_exactly_its_place() -> None:
    """No fuzz and no offset; red when a hunk is moved to where it seems to fit."""
    hunk = Hunk(start=2, old=("b\n", "c\n"), new=("b\n", "x\n", "c\n"))
    assert apply_hunks("a\nb\nc\n", (hunk,), label="p") == "a\nb\nx\nc\n"
    for text in ("b\nc\n", "a\na\nb\nc\n", "a\nb\nc"):
        with pytest.raises(EngineError, match="p: line 2 is not"):
            apply_hunks(text, (hunk,), label="p")


def test_reversed_hunks_take_every_change_back() -> None:
    """Two hunks that change the length; red when the second one's line is off."""
    hunks = (
        Hunk(start=1, old=("a\n",), new=("a\n", "1\n", "2\n")),
        Hunk(start=3, old=("c\n", "d\n"), new=("d\n",)),
    )
    text = "a\nb\nc\nd\n"
    patched = apply_hunks(text, hunks, label="p")
    assert patched == "a\n1\n2\nb\nd\n"
    reverse = reverse_hunks(hunks)
    assert apply_hunks(patched, reverse, label="p") == text


def test_other_release_is_refused_with_the_known_one(tree: Path) -> None:
    """Red when an unpinned version is patched."""
    targets.check_version(TARGET, tree)
    (tree / f"sglang-{TARGET.version}.dist-info").rename(tree / "sglang-0.9.dist-info")
    with pytest.raises(EngineError, match=r"sglang 0\.9, expected one of \[0\.5\.23"):
        targets.check_version(TARGET, tree)


def test_root_is_found_in_a_wheel_and_in_a_checkout(tree: Path, tmp_path: Path) -> None:
    """Red when a source checkout's python/ folder is not looked into."""
    assert targets.find_root(TARGET, tree) == tree
    (tmp_path / "checkout").mkdir()
    tree.rename(tmp_path / "checkout" / "python")
    root = targets.find_root(TARGET, tmp_path / "checkout")
    assert root == tmp_path / "checkout" / "python"
    with pytest.raises(EngineError, match="no package 'sglang' here"):
        targets.find_root(TARGET, tmp_path)


def test_every_new_file_is_named_by_one_patch() -> None:
    """Red when export would not know which patch brings a file."""
    named = [
        path for patch in read_series(TARGET.patches) for path in patch.trailers("Adds")
    ]
    for path in TARGET.new_files():
        owners = [name for name in named if TARGET.upstream(path).startswith(name)]
        assert len(owners) == 1, path
