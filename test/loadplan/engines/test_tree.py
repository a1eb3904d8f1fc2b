"""Writing a tree: full disks, links and modes."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from engine_tree import LOADER, TARGET, make_tree, snapshot

from loadplan.engines import apply, tree
from loadplan.engines.survey import FileState, file_states
from loadplan.errors import EngineError

GLUE = "sglang/srt/model_loader/planned_weights.py"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "site-packages")


def test_write_that_fails_takes_the_earlier_ones_back(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk in the middle; red when half of the files stay patched."""
    before = snapshot(root)
    replace, calls = os.replace, []

    def failing(source, destination):
        calls.append(destination)
        if len(calls) == 6:
            raise OSError(28, "No space left on device")
        return replace(source, destination)

    edits = apply.plan_apply(TARGET, root)
    monkeypatch.setattr(os, "replace", failing)
    with pytest.raises(EngineError, match="No space left.*nothing was changed"):
        tree.commit(root, edits)
    assert snapshot(root) == before


def test_hard_links_modes_and_compiled_files(root: Path) -> None:
    """uv links installations to its cache; red when the cache is written through."""
    loader = root / LOADER
    loader.chmod(0o640)
    linked = root.parent / "cache.py"
    os.link(loader, linked)
    content = loader.read_bytes()
    stale = loader.parent / "__pycache__" / "loader.cpython-312.pyc"
    stale.parent.mkdir()
    stale.write_bytes(b"stale")
    other = stale.with_name("loader_of_others.cpython-312.pyc")
    other.write_bytes(b"kept")
    apply.apply(TARGET, root)
    assert linked.read_bytes() == content != loader.read_bytes()
    assert loader.stat().st_mode & 0o777 == 0o640
    assert not stale.exists()
    assert other.exists()


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


def test_read_only_file_is_patched_and_stays_read_only(root: Path) -> None:
    """Red when the mode is lost, or a file is opened for writing in place."""
    (root / LOADER).chmod(0o444)
    before = snapshot(root)
    apply.apply(TARGET, root)
    assert (root / LOADER).stat().st_mode & 0o777 == 0o444
    apply.revert(TARGET, root)
    assert snapshot(root) == before


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


@pytest.mark.parametrize("path", ["../outside.py", "/outside.py", "a/../../b.py"])
def test_path_that_leaves_the_root_is_refused(root: Path, path: str) -> None:
    """Red when a damaged targets.toml could write anywhere."""
    with pytest.raises(EngineError, match="expected a path below"):
        tree.commit(root, [tree.Edit(path=path, before=None, after=b"")])
    with pytest.raises(EngineError, match="expected a path below"):
        tree.read(root, path)


@pytest.mark.parametrize("number", [errno.EPERM, errno.EINVAL, errno.EIO])
def test_owner_that_cannot_be_given(
    root: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """As in a rootless container, for an owner that is not mapped there (EINVAL).

    Red when apply stops at it, or goes on after a disk's error.
    """
    before = snapshot(root)
    real = Path.stat

    def of_somebody_else(self: Path, **options: bool) -> os.stat_result:
        values = list(real(self, **options))
        values[4] += 1  # st_uid
        return os.stat_result(values)

    def refuse(*arguments: object, **options: object) -> None:
        refused.append(arguments)
        raise OSError(number, os.strerror(number))

    refused: list[object] = []
    with monkeypatch.context() as patch:
        patch.setattr(Path, "stat", of_somebody_else)
        patch.setattr(os, "fchown", refuse)
        patch.setattr(os, "chown", refuse)
        if number == errno.EIO:
            with pytest.raises(EngineError, match="Input/output.*nothing was changed"):
                apply.apply(TARGET, root)
            assert snapshot(root) == before
            return
        apply.apply(TARGET, root)
    assert len(refused) > 8
    assert set(file_states(TARGET, root).values()) == {FileState.PATCHED}
    apply.revert(TARGET, root)
    assert snapshot(root) == before
