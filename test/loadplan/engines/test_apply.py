"""What apply and revert leave behind, whatever they find and however they end."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import warm
from engine_tree import LOADER, PRISTINE, TARGET, make_tree, snapshot

from loadplan import cli
from loadplan.engines import apply, tree
from loadplan.engines.survey import FileState, file_states, sha256
from loadplan.errors import EngineError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "site-packages")


def states(root: Path) -> set[FileState]:
    return set(file_states(TARGET, root).values())


def test_apply_and_revert_end_in_the_same_bytes(root: Path) -> None:
    """Red when revert leaves a file behind or does not give the release's bytes."""
    before = snapshot(root)
    assert states(root) == {FileState.PRISTINE}
    # A receipt for each file, and RECORD.
    written = len(TARGET.files) + len(TARGET.new_files())
    assert len(apply.apply(TARGET, root)) == 2 * written + 1
    assert states(root) == {FileState.PATCHED}
    assert apply.apply(TARGET, root) == []
    apply.revert(TARGET, root)
    assert snapshot(root) == before
    assert apply.revert(TARGET, root) == []
    assert not (root / TARGET.core_folder).exists()


def test_tree_that_an_earlier_run_left_half_done_converges(root: Path) -> None:
    """Each file is judged by itself; red when a mixed tree is refused."""
    before = snapshot(root)
    edits = apply.plan_apply(TARGET, root)
    for done in range(len(edits)):
        tree.commit(root, edits[done : done + 1])
        if done % 5 == 0:
            apply.apply(TARGET, root)
            assert states(root) == {FileState.PATCHED}
            apply.revert(TARGET, root)
            tree.commit(root, edits[: done + 1])
    assert states(root) == {FileState.PATCHED}
    apply.revert(TARGET, root)
    assert snapshot(root) == before


@pytest.mark.parametrize("run", [apply.apply, apply.revert])
def test_unknown_file_stops_the_run_before_anything_is_written(root: Path, run) -> None:
    """Red when a file that somebody changed is patched or overwritten."""
    with (root / LOADER).open("a") as file:
        file.write("# mine\n")
    before = snapshot(root)
    with pytest.raises(EngineError, match="loader.py: changed by something else"):
        run(TARGET, root)
    (root / LOADER).unlink()
    with pytest.raises(EngineError, match="loader.py: no such file"):
        run(TARGET, root)
    before.pop(LOADER)
    assert snapshot(root) == before


def test_patched_files_are_what_the_hashes_say(root: Path) -> None:
    """Red when a patch is edited without its hash, or a hash without its patch."""
    apply.apply(TARGET, root)
    for path, hashes in TARGET.files.items():
        assert sha256((root / path).read_bytes()) == hashes["patched"]
        assert sha256((PRISTINE / path).read_bytes()) == hashes["pristine"]


def test_killed_runs_are_repaired_by_the_next(tmp_path: Path) -> None:
    """At every step and ten times at random; red when one order converges not.

    ``make test-slow`` kills a thousand times.
    """
    result = warm.run(
        [Path(__file__).parents[1] / "kill_loop.py", "10"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
    )
    assert result.returncode == 0, result.stderr
    assert "10 kills" in result.stdout


def test_two_runs_at_once_are_refused(root: Path) -> None:
    """Red when one run cleans away what another has staged."""
    with tree.lock(root), pytest.raises(EngineError, match="another loadplan is"):
        apply.apply(TARGET, root)
    apply.apply(TARGET, root)


def test_interrupted_run_takes_its_changes_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C between two renames; red when it leaves a half-done tree."""
    before = snapshot(root)
    replace, calls = os.replace, []

    def interrupted(source, destination):
        calls.append(destination)
        if len(calls) == 20:
            raise KeyboardInterrupt
        replace(source, destination)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        apply.apply(TARGET, root)
    assert snapshot(root) == before


def test_root_itself_may_be_reached_through_a_link(root: Path, tmp_path: Path) -> None:
    """Red when an environment behind a link cannot be patched."""
    (tmp_path / "link").symlink_to(root)
    apply.apply(TARGET, tmp_path / "link")
    assert states(root) == {FileState.PATCHED}


def test_patches_of_the_current_folder_are_not_used(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when anything but the package's own data decides what is written."""
    folder = tmp_path / "work"
    shutil.copytree(TARGET.patches.parent, folder / "patches")
    (folder / "patches" / "sglang" / "series").write_text("evil.patch\n")
    (folder / "patches" / "targets.toml").write_text("")
    monkeypatch.chdir(folder)
    assert cli.main(["apply", "sglang", "--target", str(root)]) == 0
    assert states(root) == {FileState.PATCHED}
