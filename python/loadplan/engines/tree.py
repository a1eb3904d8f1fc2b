"""Write files of somebody's installation: every one whole, all of them or none.

New content is staged in temporary files first, so that a full disk or a folder that
cannot be written shows before anything is changed; then one rename puts each file in
its place. Whoever holds a hard link to the old file, as uv's cache does, keeps it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from loadplan.errors import EngineError

_TEMPORARY = ".loadplan-"

# What chown(2) says where owners cannot be given: to others than root, for an owner
# that a rootless container's user namespace does not map, on file systems without.
_NOT_GIVEN = (
    errno.EPERM,
    errno.EACCES,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EOPNOTSUPP,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Edit:
    """A file of the tree, by path relative to it, and what it should become.

    ``before`` is what it is now; None in either place means that there is no file.
    """

    path: str
    before: bytes | None
    after: bytes | None


@contextlib.contextmanager
def lock(root: Path) -> Iterator[None]:
    """Keep other runs of loadplan off this tree; a killed run holds it no longer.

    Raises:
        EngineError: another run is at work.
    """
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise EngineError(
                f"{root}: another loadplan is at work here; try again when it has ended"
            ) from error
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(descriptor)


def read(root: Path, path: str) -> bytes | None:
    """The content of a file, None if there is none.

    Raises:
        EngineError: ``path`` leads through a link or names no plain file.
    """
    _check_plain(root, path)
    file = root / path
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise EngineError(f"{file}: expected a plain file. Nothing was changed")
        return file.read_bytes()
    except FileNotFoundError:
        return None


def commit(root: Path, edits: Iterable[Edit]) -> None:
    """Carry out ``edits`` in their order; when one fails the others are taken back.

    Modes and owners of replaced files stay, compiled forms of all files go.

    Raises:
        EngineError: something cannot be written.
    """
    edits = list(edits)
    for edit in edits:
        _check_plain(root, edit.path)
    staged: dict[str, str] = {}
    done: list[Edit] = []
    current = edits[0].path if edits else ""
    try:
        for edit in edits:
            current = edit.path
            if edit.after is not None:
                staged[edit.path] = _stage(root / edit.path, edit.after)
        for edit in edits:
            current = edit.path
            done.append(edit)
            _put(root / edit.path, staged.get(edit.path))
            staged.pop(edit.path, None)
        for folder in {(root / edit.path).parent for edit in edits}:
            _sync(folder)
    except BaseException as error:
        outcome = "nothing was changed"
        try:
            for edit in reversed(done):
                again = None
                if edit.before is not None:
                    again = _stage(root / edit.path, edit.before)
                _put(root / edit.path, again)
        except OSError:
            outcome = "the tree is half done, run the command again"
        if isinstance(error, OSError):
            raise EngineError(
                f"{root / current}: cannot be written ({error}); {outcome}"
            ) from error
        raise
    finally:
        for temporary in staged.values():
            Path(temporary).unlink(missing_ok=True)
        _remove_empty_folders(root, (edit.path for edit in edits))


def leftovers(root: Path, paths: Iterable[str]) -> list[str]:
    """Temporary files, by path, that a killed run left beside ``paths``."""
    found = set()
    for folder in {str(PurePosixPath(path).parent) for path in paths}:
        _check_plain(root, folder)
        for file in (root / folder).glob(f"{_TEMPORARY}*"):
            if stat.S_ISREG(file.lstat().st_mode):
                found.add(file.relative_to(root).as_posix())
    return sorted(found)


def clean(root: Path, paths: Iterable[str]) -> None:
    """Remove what a killed run may have left beside ``paths``, empty folders too."""
    paths = list(paths)
    absent = [path for path in paths if not (root / path).exists()]
    try:
        for path in leftovers(root, paths):
            (root / path).unlink(missing_ok=True)
        for path in absent:
            _remove_compiled(root / path)
    except OSError as error:
        raise EngineError(
            f"{root}: what an earlier run left cannot be removed ({error}); run this "
            "as the owner of the engine"
        ) from error
    _remove_empty_folders(root, absent)


def _check_plain(root: Path, path: str) -> None:
    """Refuse a path that leaves ``root``, by name or by a link on the way."""
    parts = PurePosixPath(path).parts
    if ".." in parts or PurePosixPath(path).is_absolute():
        raise EngineError(f"{path!r}: expected a path below {root}")
    place = root
    for part in parts:
        place = place / part
        if place.is_symlink():
            raise EngineError(
                f"{place}: a symbolic link, expected a plain file or folder; install "
                "the engine with copies or hard links. Nothing was changed"
            )


def _stage(path: Path, content: bytes) -> str:
    """A temporary file beside ``path`` that is ready to take its place."""
    for folder in reversed([p for p in path.parents if not p.exists()]):
        folder.mkdir(exist_ok=True)
        _give(folder, folder.parent.stat())
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=_TEMPORARY)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            mode = 0o644
            if path.exists():
                mode = path.stat().st_mode & 0o7777
                _give(file.fileno(), path.stat())
            else:
                _give(file.fileno(), path.parent.stat())
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return temporary


def _give(place: Path | int, like: os.stat_result) -> None:
    """Let root's files belong to whom the tree belongs; never through a link.

    Where that cannot be they stay the writer's, who can read them as well.
    """
    own = os.stat(place)
    if (own.st_uid, own.st_gid) == (like.st_uid, like.st_gid):
        return
    try:
        if isinstance(place, int):
            os.fchown(place, like.st_uid, like.st_gid)
        else:
            os.chown(place, like.st_uid, like.st_gid, follow_symlinks=False)
    except OSError as error:
        if error.errno not in _NOT_GIVEN:
            raise


def _put(path: Path, staged: str | None) -> None:
    _remove_compiled(path)
    if staged is None:
        path.unlink(missing_ok=True)
    else:
        os.replace(staged, path)


def _remove_compiled(path: Path) -> None:
    cache = path.parent / "__pycache__"
    if path.suffix == ".py" and cache.is_dir() and not cache.is_symlink():
        for stale in cache.glob(f"{path.stem}.*.pyc"):
            stale.unlink(missing_ok=True)


def _remove_empty_folders(root: Path, paths: Iterable[str]) -> None:
    """Remove the folders of ``paths``, their compiled files' too, if they are empty."""
    folders = {
        root / parent for path in paths for parent in PurePosixPath(path).parents
    }
    caches = {folder / "__pycache__" for folder in folders}
    for folder in sorted(folders | caches, key=lambda f: len(f.parts), reverse=True):
        if folder != root and folder.is_dir() and not folder.is_symlink():
            with contextlib.suppress(OSError):
                folder.rmdir()


def _sync(folder: Path) -> None:
    """Make renames in ``folder`` last; a folder that is gone needs none."""
    with contextlib.suppress(FileNotFoundError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
