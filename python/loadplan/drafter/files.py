"""Write so that a kill leaves the old file, the new one or none, never a half of one.

A file is written beside its place under a name that tells so, synced and renamed.
Whatever a killed run left under that name is removed by the next one.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from loadplan.core.header import LoadPlanError

BLOCK = 8 << 20
"""Bytes that are read or written at once."""

Progress = Callable[[int], None]
"""Told how many bytes (or rows) were done since the last call."""


def no_progress(_: int) -> None:
    """Tell nobody."""


def partial(path: Path) -> Path:
    """Where ``path`` is made, in the same folder so that a rename puts it in place."""
    return path.with_name(f".{path.name}.partial")


def write(path: Path, chunks: Iterable[Any], *, mode: int | None = None) -> None:
    """Put the bytes of ``chunks`` at ``path``, whole and synced, as a new inode.

    What else is linked to an existing ``path`` keeps its bytes. ``mode`` is that of the
    file: by default the one that ``path`` has, else the process's own.
    """
    if mode is None:
        mode = path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask()
    temporary = partial(path)
    temporary.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_json(path: Path, value: Any, *, mode: int | None = None) -> None:
    """Put ``value`` at ``path`` as JSON, in the order that it has."""
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    write(path, [text.encode()], mode=mode)


def read_json(path: Path, *, what: str) -> Any:
    """The value in a JSON file.

    Raises:
        LoadPlanError: the file is missing or holds no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LoadPlanError(f"{path}: no such file, expected {what}") from error
    except (ValueError, RecursionError, OSError) as error:
        raise LoadPlanError(f"{path}: {error}, expected {what}") from error


def copy(source: Path, target: Path, *, progress: Progress = no_progress) -> None:
    """Copy bytes and mode of ``source`` into a file of its own."""
    mode = source.stat().st_mode & 0o7777
    write(target, blocks(source, progress=progress), mode=mode)


def blocks(path: Path, *, progress: Progress = no_progress) -> Iterator[bytes]:
    """The bytes of ``path``, a block at a time."""
    with path.open("rb") as file:
        while block := file.read(BLOCK):
            yield block
            progress(len(block))


def digest(path: Path) -> str:
    """The SHA-256 of a file's bytes, as hex digits."""
    found = hashlib.sha256()
    for block in blocks(path):
        found.update(block)
    return found.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def fresh_folder(folder: Path) -> Path:
    """Make an empty ``folder``, in place of what a killed run left there.

    Hard links in it are taken away, not written through.
    """
    if folder.is_symlink() or folder.is_file():
        folder.unlink()
    elif folder.exists():
        shutil.rmtree(folder)
    os.mkdir(folder)
    return folder


def check_new(path: Path, *, what: str) -> None:
    """Raises LoadPlanError where ``path`` is taken or its folder is missing."""
    if os.path.lexists(path):
        raise LoadPlanError(
            f"{path}: is there already, expected a new name for {what}; remove it or "
            "name another one"
        )
    if not path.absolute().parent.is_dir():
        raise LoadPlanError(
            f"{path}: its folder is missing, expected one to put {what} in; make it"
        )


def check_space(folder: Path, nbytes: int, *, what: str) -> None:
    """Raises LoadPlanError where the file system of ``folder`` has too little room."""
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise LoadPlanError(
            f"{folder}: {free} B are free, expected at least {nbytes} B for {what}; "
            "make room or name a folder on another file system"
        )


def _umask() -> int:
    # It can only be read by setting it.
    umask = os.umask(0o077)
    os.umask(umask)
    return umask
