"""Apply a patch series to an engine's files, and take it back: whole or not at all.

Every touched file is pristine, patched or unknown, judged by its hash alone, so that a
tree that an earlier run left half done is finished by the next one. Patches are applied
here rather than by ``git apply``, which changes nothing and exits 0 when the target
lies in an ignored folder of somebody's repository.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import os
import re
import tempfile
from pathlib import Path

from .core import LoadPlanError
from .engines import Target

_HUNK = re.compile(r"@@ -(\d+)(?:,\d+)? \+(\d+)(?:,\d+)? @@")


class FileState(enum.Enum):
    PRISTINE = "pristine"
    PATCHED = "patched"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Hunk:
    """A change at one place: ``old`` lines, which start at line ``start`` (from 1)."""

    start: int
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Patch:
    """One concern: its mail header and, by upstream path, the hunks it makes."""

    name: str
    header: str
    hunks: dict[str, tuple[Hunk, ...]]


@dataclasses.dataclass(frozen=True, slots=True)
class Edit:
    """A file of the target, by path relative to it, and what it should become.

    ``before`` is what it is now; None in either place means that there is no file.
    """

    path: str
    before: bytes | None
    after: bytes | None


def read_series(target: Target) -> list[Patch]:
    """The patches of ``target`` in the order of its series file."""
    names = [
        line.strip()
        for line in (target.patches / "series").read_text().splitlines()
        if line.strip() and not line.startswith("#")
    ]
    return [read_patch(target.patches / name) for name in names]


def read_patch(path: Path) -> Patch:
    """Parse a unified diff with a mail header, as ``git diff`` writes it."""
    header, _, diff = path.read_text().partition("\ndiff --git ")
    hunks: dict[str, list[Hunk]] = {}
    file = ""
    start, old, new = 0, [], []

    def close() -> None:
        if old or new:
            hunks[file].append(Hunk(start=start, old=tuple(old), new=tuple(new)))
            old.clear()
            new.clear()

    for line in diff.splitlines(keepends=True):
        match = _HUNK.match(line)
        if match:
            close()
            start = int(match[1])
        elif line.startswith("+++ b/"):
            close()
            file = line[len("+++ b/") :].strip()
            hunks[file] = []
        elif line.startswith(("diff --git ", "index ", "--- a/")):
            close()
        elif file and line[0] in " -+":
            if line[0] != "+":
                old.append(line[1:])
            if line[0] != "-":
                new.append(line[1:])
    close()
    return Patch(
        name=path.name,
        header=header,
        hunks={file: tuple(found) for file, found in hunks.items()},
    )


def apply_hunks(text: str, hunks: tuple[Hunk, ...], *, label: str) -> str:
    """Replace each hunk's old lines, found at exactly its line, by its new ones."""
    lines = text.splitlines(keepends=True)
    for hunk in reversed(hunks):
        first = hunk.start - 1
        if tuple(lines[first : first + len(hunk.old)]) != hunk.old:
            raise LoadPlanError(
                f"{label}: line {hunk.start} is not what the patch expects; "
                "refresh the patch for this release"
            )
        lines[first : first + len(hunk.old)] = hunk.new
    return "".join(lines)


def reverse_hunks(hunks: tuple[Hunk, ...]) -> tuple[Hunk, ...]:
    """The hunks that take ``hunks`` back."""
    shift, reversed_hunks = 0, []
    for hunk in hunks:
        reversed_hunks.append(Hunk(hunk.start + shift, old=hunk.new, new=hunk.old))
        shift += len(hunk.new) - len(hunk.old)
    return tuple(reversed_hunks)


def plan_apply(target: Target, root: Path) -> list[Edit]:
    """What ``apply`` would change below ``root``; nothing is written.

    Raises:
        LoadPlanError: a file is unknown, a new file is taken, or a patch does not give
            the expected result.
    """
    edits = []
    for path, hashes in target.files.items():
        content = _existing(target, root, path)
        if _state(content, hashes) is FileState.PATCHED:
            continue
        text = content.decode()
        for patch in read_series(target):
            hunks = patch.hunks.get(target.upstream(path), ())
            text = apply_hunks(text, hunks, label=f"{patch.name}: {path}")
        _check_hash(path, text.encode(), hashes["patched"])
        edits.append(Edit(path=path, before=content, after=text.encode()))
    for path, content in target.new_files().items():
        present = _read(root / path)
        if present is None or present != content:
            edits.append(Edit(path=path, before=present, after=content))
    return edits


def plan_revert(target: Target, root: Path) -> list[Edit]:
    """What ``revert`` would change below ``root``; nothing is written."""
    edits = []
    for path, hashes in target.files.items():
        content = _existing(target, root, path)
        if _state(content, hashes) is FileState.PRISTINE:
            continue
        text = content.decode()
        for patch in reversed(read_series(target)):
            hunks = reverse_hunks(patch.hunks.get(target.upstream(path), ()))
            text = apply_hunks(text, hunks, label=f"{patch.name}: {path}")
        _check_hash(path, text.encode(), hashes["pristine"])
        edits.append(Edit(path=path, before=content, after=text.encode()))
    for path in target.new_files():
        present = _read(root / path)
        if present is not None:
            edits.append(Edit(path=path, before=present, after=None))
    return edits


def file_states(target: Target, root: Path) -> dict[str, FileState]:
    """The state of each file that ``apply`` touches; an absent new file is PRISTINE."""
    states = {}
    for path, hashes in target.files.items():
        states[path] = _state(_read(root / path), hashes)
    for path, content in target.new_files().items():
        present = _read(root / path)
        if present is None:
            states[path] = FileState.PRISTINE
        else:
            same = present == content
            states[path] = FileState.PATCHED if same else FileState.UNKNOWN
    return states


def commit(root: Path, edits: list[Edit]) -> None:
    """Carry out ``edits``; when one fails the earlier ones are taken back."""
    done: list[Edit] = []
    try:
        for edit in edits:
            done.append(edit)
            _write(root, edit.path, edit.after)
    except OSError as error:
        for edit in reversed(done):
            _write(root, edit.path, edit.before)
        raise LoadPlanError(
            f"{root / done[-1].path}: cannot be written ({error}); nothing was changed"
        ) from error


def _existing(target: Target, root: Path, path: str) -> bytes:
    content = _read(root / path)
    state = _state(content, target.files[path])
    if state is FileState.UNKNOWN:
        found = "no such file" if content is None else "changed by something else"
        raise LoadPlanError(
            f"{root / path}: {found}, expected the file of {target.name} "
            f"{target.version} or its patched form; reinstall {target.name} "
            f"{target.version}. Nothing was changed"
        )
    return content


def _state(content: bytes | None, hashes: dict[str, str]) -> FileState:
    if content is not None:
        digest = sha256(content)
        if digest == hashes["patched"]:
            return FileState.PATCHED
        if digest == hashes["pristine"]:
            return FileState.PRISTINE
    return FileState.UNKNOWN


def _check_hash(path: str, content: bytes, expected: str) -> None:
    if sha256(content) != expected:
        raise LoadPlanError(
            f"{path}: the patches give sha256 {sha256(content)}, expected {expected}; "
            "this loadplan is damaged, reinstall it. Nothing was changed"
        )


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _write(root: Path, relative: str, content: bytes | None) -> None:
    """Replace a file in one step, or remove it; hard links to it stay as they are."""
    path = root / relative
    for stale in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        stale.unlink()
    if content is None:
        path.unlink(missing_ok=True)
        _remove_empty(path.parent / "__pycache__")
        _remove_empty(path.parent)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    mode = path.stat().st_mode & 0o7777 if path.exists() else 0o644
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=".loadplan-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), mode)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _remove_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()
