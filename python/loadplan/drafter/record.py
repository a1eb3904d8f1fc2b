"""What a source looked like, so that it can be shown to be the same later."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from loadplan.core.header import LoadPlanError
from loadplan.drafter import files
from loadplan.drafter.checkpoint import list_files

# Files up to this size are hashed whole, larger ones at so many places.
_WHOLE = 64 << 20
_PLACES, _PLACE = 64, 64 << 10


def snapshot(
    folder: Path, *, progress: files.Progress = files.no_progress
) -> dict[str, dict[str, Any]]:
    """Size, mtime, inode and hash of every file in ``folder``, links followed.

    Raises:
        LoadPlanError: one of them is a link to nowhere or no file.
    """
    found = {}
    for name in list_files(folder):
        path = folder / name
        if not path.is_file():
            raise LoadPlanError(
                f"{path}: no regular file, expected a checkpoint's; repair or remove it"
            )
        status = path.stat()
        found[name] = {
            "size": status.st_size,
            "mtime_ns": status.st_mtime_ns,
            "inode": status.st_ino,
            "sha256": _digest(path, status.st_size),
        }
        progress(status.st_size)
    return found


def differences(
    old: dict[str, dict[str, Any]], new: dict[str, dict[str, Any]]
) -> list[str]:
    """What changed, a line for each file."""
    lines = [f"{name} is gone" for name in sorted(set(old) - set(new))]
    lines += [f"{name} is new" for name in sorted(set(new) - set(old))]
    for name in sorted(set(old) & set(new)):
        changed = [key for key in old[name] if old[name][key] != new[name].get(key)]
        if changed:
            lines.append(f"{name} has another {', '.join(changed)}")
    return lines


def _digest(path: Path, size: int) -> str:
    """The whole file's hash, for a large one that of its begin, end and places between.

    Whoever rewrites a file of weights changes its header or moves its bytes; size,
    mtime and inode tell the rest.
    """
    if size <= _WHOLE:
        return files.digest(path)
    found = hashlib.sha256()
    with path.open("rb") as file:
        for place in range(_PLACES):
            file.seek((size - _PLACE) * place // (_PLACES - 1))
            found.update(file.read(_PLACE))
    return found.hexdigest()
