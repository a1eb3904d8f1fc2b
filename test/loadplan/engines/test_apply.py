"""What apply and revert leave behind, whatever they find and however they end."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm
from engine_tree import LOADER, PRISTINE, TARGET, make_tree, record_line, snapshot

from loadplan import cli
from loadplan.engines import apply, targets, tree
from loadplan.engines.apply import FileState
from loadplan.errors import EngineError

CORE = f"{TARGET.core_folder}/plan.py"
GLUE = "sglang/srt/model_loader/planned_weights.py"
RETIRED_FILE = "sglang/__init__.py"
RETIRED_GLUE = "sglang/srt/model_loader/retired_glue.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "site-packages")


def states(root: Path) -> set[FileState]:
    return set(apply.file_states(TARGET, root).values())


# RECORD


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["wheel", "pip"])
def test_record_lists_what_is_there_and_is_itself_again(
    tmp_path: Path, end: str
) -> None:
    """Red when pip would miss a file or a hash, or RECORD does not come back."""
    root = make_tree(tmp_path / "site-packages", end=end)
    record = root / TARGET.record
    before = record.read_bytes()
    apply.apply(TARGET, root)
    text = record.read_bytes().decode()
    lines = text.split(end)
    present = {p for p in snapshot(root) if p.startswith("sglang/") and "." in p}
    originals = f"{TARGET.core_folder}/originals"
    present |= {f"{originals}/{p.name}" for p in (root / originals).iterdir()}
    for path in present:
        assert lines.count(record_line(root, path)) == 1, path
    assert len(lines) == len(present) + 3
    assert text.count("\n") == text.count(end)
    apply.revert(TARGET, root)
    assert record.read_bytes() == before


def test_record_keeps_lines_that_no_installer_writes(root: Path) -> None:
    """Red when a line that cannot be computed back is rewritten."""
    record = root / TARGET.record
    odd = f"{LOADER},sha512=abc,1\n{LOADER},,\n{LOADER},sha256={'A' * 43},5\nno comma"
    record.write_bytes(record.read_bytes() + odd.encode())
    before = record.read_bytes()
    apply.apply(TARGET, root)
    assert record.read_bytes().endswith(odd.encode())
    apply.revert(TARGET, root)
    assert record.read_bytes() == before


def test_tree_without_record_is_patched_without_one(root: Path) -> None:
    """A checkout; red when RECORD is required or made."""
    shutil.rmtree((root / TARGET.record).parent)
    before = snapshot(root)
    apply.apply(TARGET, root)
    assert not list(root.rglob("RECORD"))
    apply.revert(TARGET, root)
    assert snapshot(root) == before


# Other versions of loadplan


def other_version(monkeypatch: pytest.MonkeyPatch) -> targets.Target:
    """A loadplan whose patches give other bytes and touch another file too.

    It has a glue file and a core module more than this one.
    """
    new = targets.Target.new_files(TARGET)
    new[CORE] += b"# of another version\n"
    new[f"{TARGET.core_folder}/gone.py"] = b"GONE = 1\n"
    new[RETIRED_GLUE] = b"OLD = 1\n"
    files = {path: dict(hashes) for path, hashes in TARGET.files.items()}
    files[RETIRED_FILE] = {"pristine": apply.sha256(engine_file(RETIRED_FILE))}
    patched = apply._patched

    def more(series, upstream, content):
        return patched(series, upstream, content) + b"# of another version\n"

    for path in files:
        content = more(
            apply.read_series(TARGET.patches),
            TARGET.upstream(path),
            (engine_file(path)),
        )
        files[path]["patched"] = apply.sha256(content)
    monkeypatch.setattr(apply, "_patched", more)
    monkeypatch.setattr(targets.Target, "new_files", lambda self: new)
    return dataclasses.replace(TARGET, files=files)


def engine_file(path: str) -> bytes:
    return (PRISTINE / path).read_bytes()


RETIRING = dataclasses.replace(
    TARGET,
    retired={
        RETIRED_FILE: apply.sha256((PRISTINE / RETIRED_FILE).read_bytes()),
        RETIRED_GLUE: "",
    },
)


@pytest.fixture
def other_tree(root: Path) -> Path:
    """Patched by the other version."""
    with pytest.MonkeyPatch.context() as patch:
        apply.apply(other_version(patch), root)
    return root


def test_leftovers_of_another_version_are_reverted(
    tmp_path: Path, other_tree: Path
) -> None:
    """Red when a byte of another version stays, in a file, a folder or RECORD."""
    assert FileState.OTHER in states(other_tree)
    apply.revert(RETIRING, other_tree)
    assert snapshot(other_tree) == snapshot(make_tree(tmp_path / "stock"))


def test_apply_over_another_version_gives_this_one(
    tmp_path: Path, other_tree: Path
) -> None:
    """Red when an upgrade needs a revert, or leaves modules of before."""
    apply.apply(RETIRING, other_tree)
    fresh = make_tree(tmp_path / "fresh")
    apply.apply(TARGET, fresh)
    assert snapshot(other_tree) == snapshot(fresh)
    assert states(other_tree) == {FileState.PATCHED}
    assert apply.file_states(RETIRING, other_tree).keys() == (
        apply.file_states(TARGET, other_tree).keys()
    )


def test_file_that_this_version_does_not_know_stops_both(other_tree: Path) -> None:
    """A newer version's; red when it is left behind in silence, or written."""
    before = snapshot(other_tree)
    for run in (apply.apply, apply.revert):
        with pytest.raises(EngineError, match="__init__.py: patched by another"):
            run(TARGET, other_tree)
    assert snapshot(other_tree) == before
    assert apply.status(TARGET, other_tree).state == "unknown"


@pytest.mark.parametrize("path", [LOADER, CORE, GLUE])
@pytest.mark.parametrize("run", [apply.apply, apply.revert])
def test_file_changed_by_hand_stops_both(root: Path, path: str, run) -> None:
    """Also on top of the patch; red when somebody's edit is overwritten."""
    apply.apply(TARGET, root)
    with (root / path).open("a") as file:
        file.write("# mine\n")
    before = snapshot(root)
    with pytest.raises(EngineError, match=f"{Path(path).name}: changed by something"):
        run(TARGET, root)
    assert snapshot(root) == before
    assert apply.file_states(TARGET, root)[path] is FileState.UNKNOWN


def test_receipt_with_other_content_restores_nothing(root: Path) -> None:
    """Red when bytes are written back that are not the release's."""
    apply.apply(TARGET, root)
    mine = b"import os  # mine\n"
    (root / LOADER).write_bytes(mine)
    originals = root / TARGET.core_folder / "originals"
    (originals / apply.sha256(mine)).write_bytes(b"evil")
    with pytest.raises(EngineError, match="loader.py: changed by something else"):
        apply.revert(TARGET, root)


def test_somebodys_file_in_our_folder_stays(root: Path) -> None:
    """Red when revert removes what loadplan did not write."""
    apply.apply(TARGET, root)
    mine = root / TARGET.core_folder / "mine.py"
    mine.write_text("MINE = 1\n")
    apply.revert(TARGET, root)
    assert mine.read_text() == "MINE = 1\n"
    assert not (root / CORE).exists()


@pytest.mark.parametrize("count", range(0, 60, 10))
def test_killed_revert_of_another_version_is_finished(
    tmp_path: Path, other_tree: Path, count: int
) -> None:
    """After each few steps; red when receipts go before what they are needed for."""
    edits = apply.plan_revert(RETIRING, other_tree)
    tree.commit(other_tree, edits[:count])
    apply.revert(RETIRING, other_tree)
    assert snapshot(other_tree) == snapshot(make_tree(tmp_path / "stock"))


# Killed runs


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


def test_status_explains_a_killed_run_and_the_next_one_cleans(root: Path) -> None:
    """Red when temporary files of a killed run are not shown, or stay."""
    stock = snapshot(root)
    edits = apply.plan_apply(TARGET, root)
    tree.commit(root, edits[:-5])
    stray = root / TARGET.core_folder / ".loadplan-abc"
    stray.write_text("half")
    status = apply.status(TARGET, root)
    assert status.state == "mixed"
    assert "A run was killed" in status.advice
    assert f"{TARGET.core_folder}/.loadplan-abc" in status.leftovers
    apply.revert(TARGET, root)
    assert snapshot(root) == stock
    assert apply.status(TARGET, root).leftovers == ()


def test_two_runs_at_once_are_refused(root: Path) -> None:
    """Red when one run cleans away what another has staged."""
    with tree.lock(root), pytest.raises(EngineError, match="another loadplan is"):
        apply.apply(TARGET, root)
    apply.apply(TARGET, root)


# What the disk does


@pytest.mark.parametrize("run", [apply.apply, apply.revert])
def test_full_disk_changes_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch, run
) -> None:
    """At every write in turn; red when a failed run leaves a file or a folder."""
    if run is apply.revert:
        apply.apply(TARGET, root)
    before = snapshot(root)
    fsync = os.fsync
    for room in range(0, 100, 4):
        calls = []

        def failing(descriptor: int, room=room, calls=calls) -> None:
            calls.append(descriptor)
            if len(calls) > room:
                raise OSError(28, "No space left on device")
            fsync(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing)
            # Renames are made to last when all is done; a failure there is too late.
            patch.setattr(tree, "_sync", lambda folder: None)
            try:
                run(TARGET, root)
            except EngineError as error:
                assert "No space left on device" in str(error)
                assert "nothing was changed" in str(error)
            else:
                break
        assert snapshot(root) == before
    assert room > 8


def test_kernel_that_stops_a_write_in_the_middle_changes_nothing(root: Path) -> None:
    """Past a real limit on file sizes; red when a file is cut short or half applied."""
    before = snapshot(root)
    code = (
        "import resource, signal, sys; from loadplan.cli import main\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        f"sys.exit(main(['apply', 'sglang', '--target', {str(root)!r}]))"
    )
    assert max((root / path).stat().st_size for path in TARGET.files) > 100_000
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True
    )
    assert result.returncode == 1
    assert "File too large" in result.stderr
    assert "nothing was changed" in result.stderr
    assert snapshot(root) == before
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 100_000


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


def test_read_only_file_is_patched_and_stays_read_only(root: Path) -> None:
    """Red when the mode is lost, or a file is opened for writing in place."""
    (root / LOADER).chmod(0o444)
    before = snapshot(root)
    apply.apply(TARGET, root)
    assert (root / LOADER).stat().st_mode & 0o777 == 0o444
    apply.revert(TARGET, root)
    assert snapshot(root) == before


# Security


@pytest.mark.parametrize("run", [apply.apply, apply.revert])
@pytest.mark.parametrize(
    "link",
    [
        "sglang/srt/model_loader",
        "sglang",
        LOADER,
        TARGET.core_folder,
        f"{TARGET.core_folder}/originals",
        GLUE,
        TARGET.record,
    ],
)
def test_nothing_is_written_through_a_link_that_leads_out(
    root: Path, tmp_path: Path, link: str, run
) -> None:
    """Red when a folder or file behind a link is read or written."""
    apply.apply(TARGET, root)
    outside = tmp_path / "outside"
    (root / link).rename(outside)
    (root / link).symlink_to(outside)
    before = snapshot(tmp_path)
    with pytest.raises(EngineError, match="a symbolic link, expected a plain file"):
        run(TARGET, root)
    assert snapshot(tmp_path) == before


def test_compiled_files_behind_a_link_stay(root: Path, tmp_path: Path) -> None:
    """Red when stale .pyc are removed in a folder that a link leads to."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "loader.cpython-311.pyc").write_bytes(b"kept")
    (root / LOADER).with_name("__pycache__").symlink_to(outside)
    apply.apply(TARGET, root)
    assert (outside / "loader.cpython-311.pyc").read_bytes() == b"kept"


def test_root_itself_may_be_reached_through_a_link(root: Path, tmp_path: Path) -> None:
    """Red when an environment behind a link cannot be patched."""
    (tmp_path / "link").symlink_to(root)
    apply.apply(TARGET, tmp_path / "link")
    assert states(root) == {FileState.PATCHED}


@pytest.mark.parametrize("path", ["../outside.py", "/outside.py", "a/../../b.py"])
def test_path_that_leaves_the_root_is_refused(root: Path, path: str) -> None:
    """Red when a damaged targets.toml could write anywhere."""
    with pytest.raises(EngineError, match="expected a path below"):
        tree.commit(root, [tree.Edit(path=path, before=None, after=b"")])
    with pytest.raises(EngineError, match="expected a path below"):
        tree.read(root, path)


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


def test_receipts_name_no_path(root: Path) -> None:
    """Red when a file in the tree says where loadplan writes."""
    apply.apply(TARGET, root)
    folder = root / TARGET.core_folder / "originals"
    names = [path.name for path in folder.iterdir()]
    assert names
    assert all(len(name) == 64 and int(name, 16) for name in names)
    # Whatever else lies there is not read and not removed.
    (folder / "paths.json").write_text(json.dumps({"../../../evil.py": "x"}))
    apply.revert(TARGET, root)
    assert [path.name for path in folder.iterdir()] == ["paths.json"]
