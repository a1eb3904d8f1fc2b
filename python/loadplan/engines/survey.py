"""What an engine's files are: pristine, patched, or something else.

Every file is judged by its hash alone, so that a tree that a killed run left half done
is finished by the next one. What another version of loadplan wrote is known by its
receipt: a file named by the sha256 of what was written, which holds what stood there
before and is empty where nothing stood. No receipt names a path: loadplan writes only
where its own package says so.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path

from loadplan.engines import tree
from loadplan.engines.series import Patch, apply_hunks, read_series, reverse_hunks
from loadplan.engines.targets import Target
from loadplan.engines.tree import Edit
from loadplan.errors import EngineError

_DIGEST = re.compile(r"[0-9a-f]{64}")


class FileState(enum.Enum):
    """What a file is, by its hash alone."""

    PRISTINE = "pristine"
    PATCHED = "patched"
    OTHER = "patched by another version of loadplan"
    UNKNOWN = "unknown"


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A file that this loadplan may write: what it is and what it can become.

    None for a content means that there is no file.
    """

    path: str
    state: FileState
    content: bytes | None
    pristine: bytes | None
    patched: bytes | None
    # The engine has the file; all others are loadplan's own.
    touched: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Survey:
    """All that ``apply`` and ``revert`` need to know of a tree."""

    files: tuple[Found, ...]
    receipts: dict[str, bytes]
    # By path, files that another version patched and this one does not know.
    foreign: tuple[str, ...]
    record: bytes | None

    def states(self) -> dict[str, FileState]:
        """The state by path, without files that only earlier versions patched."""
        return {
            found.path: found.state
            for found in self.files
            if found.patched is not None or found.state is FileState.OTHER
        }


def survey(target: Target, root: Path) -> Survey:
    """Look at every file below ``root`` that loadplan may have written.

    Raises:
        EngineError: one lies behind a link, or the patches do not give the result.
    """
    receipts = _receipts(target, root)
    series = read_series(target.patches)
    files = []
    for path, hashes in target.files.items():
        files.append(_touched(target, root, path, hashes, receipts, series))
    for path, content in target.new_files().items():
        files.append(_own(root, path, content, receipts))
    known = {found.path for found in files}
    for path, digest in target.retired.items():
        found = _retired(root, path, digest, receipts)
        if found is not None:
            files.append(found)
    for file in sorted((root / target.core_folder).glob("*.py")):
        path = f"{target.core_folder}/{file.name}"
        if path not in known:
            found = _own(root, path, None, receipts)
            if found.state is FileState.OTHER:
                files.append(found)
    return Survey(
        files=tuple(files),
        receipts=receipts,
        foreign=_foreign(target, root, files, receipts),
        record=tree.read(root, target.record),
    )


def file_states(target: Target, root: Path) -> dict[str, FileState]:
    """The state of each file by path; PRISTINE for an absent one of loadplan's own."""
    return survey(target, root).states()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def places(target: Target, edits: Sequence[Edit]) -> list[str]:
    """Every path that a run may write."""
    paths = {*target.files, *target.new_files(), *target.retired, target.record}
    paths |= {edit.path for edit in edits} | {receipt_path(target, "any")}
    return sorted(paths)


def receipt_path(target: Target, digest: str) -> str:
    """The receipt of a file that was written with the sha256 ``digest``."""
    return f"{target.core_folder}/originals/{digest}"


def _receipts(target: Target, root: Path) -> dict[str, bytes]:
    folder = root / receipt_path(target, "any")
    tree.read(root, receipt_path(target, "any"))
    names = sorted(file.name for file in folder.parent.glob("*"))
    found = {
        name: tree.read(root, receipt_path(target, name))
        for name in names
        if _DIGEST.fullmatch(name)
    }
    return {name: content for name, content in found.items() if content is not None}


def _touched(
    target: Target,
    root: Path,
    path: str,
    hashes: dict[str, str],
    receipts: dict[str, bytes],
    series: list[Patch],
) -> Found:
    content = tree.read(root, path)
    digest = None if content is None else sha256(content)
    pristine = receipts.get(digest)
    upstream = target.upstream(path)
    if digest == hashes["pristine"]:
        state, pristine = FileState.PRISTINE, content
    elif digest == hashes["patched"]:
        state, pristine = FileState.PATCHED, _reversed(series, upstream, content)
    elif pristine is not None and sha256(pristine) == hashes["pristine"]:
        state = FileState.OTHER
    else:
        return Found(path, FileState.UNKNOWN, content, content, content, touched=True)
    patched = content
    if state is not FileState.PATCHED:
        patched = _patched(series, upstream, pristine)
    for wanted, got in (("pristine", pristine), ("patched", patched)):
        if sha256(got) != hashes[wanted]:
            raise EngineError(
                f"{path}: the patches give the {wanted} sha256 {sha256(got)}, expected "
                f"{hashes[wanted]}; this loadplan is damaged, reinstall it. Nothing "
                "was changed"
            )
    return Found(path, state, content, pristine, patched, touched=True)


def _patched(series: list[Patch], upstream: str, content: bytes) -> bytes:
    text = content.decode()
    for patch in series:
        hunks = patch.hunks.get(upstream, ())
        text = apply_hunks(text, hunks, label=f"{patch.name}: {upstream}")
    return text.encode()


def _reversed(series: list[Patch], upstream: str, content: bytes) -> bytes:
    text = content.decode()
    for patch in reversed(series):
        hunks = reverse_hunks(patch.hunks.get(upstream, ()))
        text = apply_hunks(text, hunks, label=f"{patch.name}: {upstream}")
    return text.encode()


def _own(
    root: Path, path: str, patched: bytes | None, receipts: dict[str, bytes]
) -> Found:
    content = tree.read(root, path)
    if content is None:
        state = FileState.PRISTINE
    elif content == patched:
        state = FileState.PATCHED
    elif receipts.get(sha256(content)) == b"":
        state = FileState.OTHER
    else:
        state = FileState.UNKNOWN
    return Found(path, state, content, None, patched, touched=False)


def _retired(
    root: Path, path: str, digest: str, receipts: dict[str, bytes]
) -> Found | None:
    """A file of earlier versions: ``digest`` is its pristine one, "" if it was new.

    None if it is neither pristine nor an earlier version's: then it is none of ours.
    """
    content = tree.read(root, path)
    if content is None:
        return None
    if sha256(content) == digest:
        return Found(path, FileState.PRISTINE, content, content, None, touched=True)
    pristine = receipts.get(sha256(content))
    if pristine == b"" and not digest:
        return Found(path, FileState.OTHER, content, None, None, touched=False)
    if pristine is not None and sha256(pristine) == digest:
        return Found(path, FileState.OTHER, content, pristine, None, touched=True)
    return None


def _foreign(
    target: Target, root: Path, files: list[Found], receipts: dict[str, bytes]
) -> tuple[str, ...]:
    """Files that have a receipt and are none of ``files``.

    Receipts without a file come from killed runs. Only where some are left over the
    whole package is searched for theirs.
    """
    present = {sha256(file.content) for file in files if file.content is not None}
    expected = {sha256(file.patched) for file in files if file.patched is not None}
    missing = set(receipts) - present - expected - {sha256(b"")}
    if not missing:
        return ()
    known = {file.path for file in files}
    paths = (
        file.relative_to(root).as_posix()
        for file in sorted((root / target.package).rglob("*.py"))
        if file.is_file() and sha256(file.read_bytes()) in missing
    )
    return tuple(path for path in paths if path not in known)
