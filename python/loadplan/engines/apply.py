"""Apply a patch series to an engine's files, and take it back: whole or not at all.

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
from pathlib import Path

from loadplan.engines import record, tree
from loadplan.engines.series import Patch, apply_hunks, read_series, reverse_hunks
from loadplan.engines.targets import Target
from loadplan.engines.tree import Edit
from loadplan.errors import EngineError

_DIGEST = re.compile(r"[0-9a-f]{64}")


class FileState(enum.Enum):
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
class Inspection:
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


def inspect(target: Target, root: Path) -> Inspection:
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
    return Inspection(
        files=tuple(files),
        receipts=receipts,
        foreign=_foreign(target, root, files, receipts),
        record=tree.read(root, target.record),
    )


def file_states(target: Target, root: Path) -> dict[str, FileState]:
    """The state of each file by path; PRISTINE for an absent one of loadplan's own."""
    return inspect(target, root).states()


def plan_apply(target: Target, root: Path) -> list[Edit]:
    """What ``apply`` would change below ``root``; nothing is written.

    Raises:
        EngineError: a file is unknown, or a patch does not give what it should.
    """
    found = inspect(target, root)
    _check_known(target, root, found)
    files = sorted(found.files, key=lambda file: file.touched)
    wanted = {
        sha256(file.patched): file.pristine or b""
        for file in files
        if file.patched is not None
    }
    after = {
        file.path: file.pristine if file.patched is None else file.patched
        for file in files
    }
    new = {f.path: f.patched for f in files if not f.touched and f.patched is not None}
    new |= {_receipt(target, digest): before for digest, before in wanted.items()}
    edits = [
        *_receipt_edits(target, found, wanted, add=True),
        *_file_edits(files, after),
        *_record_edits(target, found, after, new),
        *_receipt_edits(target, found, wanted, add=False),
    ]
    return edits


def plan_revert(target: Target, root: Path) -> list[Edit]:
    """What ``revert`` would change below ``root``; nothing is written.

    Raises:
        EngineError: a file is unknown.
    """
    found = inspect(target, root)
    _check_known(target, root, found)
    # The files that import loadplan's go first.
    files = sorted(found.files, key=lambda file: not file.touched)
    after = {file.path: file.pristine for file in files}
    return [
        *_file_edits(files, after),
        *_record_edits(target, found, after, {}),
        *_receipt_edits(target, found, {}, add=False),
    ]


def apply(target: Target, root: Path) -> list[Edit]:
    """Patch the engine below ``root`` and return what was changed.

    Raises:
        EngineError: a file is unknown or cannot be written; nothing was changed.
    """
    with tree.lock(root):
        edits = plan_apply(target, root)
        _run(target, root, edits)
    return edits


def revert(target: Target, root: Path) -> list[Edit]:
    """Take every patch below ``root`` back and return what was changed.

    Raises:
        EngineError: a file is unknown or cannot be written; nothing was changed.
    """
    with tree.lock(root):
        edits = plan_revert(target, root)
        _run(target, root, edits)
    return edits


@dataclasses.dataclass(frozen=True, slots=True)
class Status:
    """What a tree is, in one word, and what to do about it.

    ``leftovers`` are temporary files of a killed run, receipts of files that are gone,
    and files that another version patched and this one does not know.
    """

    state: str
    advice: str
    files: dict[str, FileState]
    leftovers: tuple[str, ...]


def status(target: Target, root: Path, *, engine: str | None = None) -> Status:
    """Explain what ``apply`` and ``revert`` would find; nothing is written.

    ``engine`` is what commands in the advice name, None the engine alone.
    """
    engine = engine or target.name
    found = inspect(target, root)
    states = set(found.states().values())
    stale = set(found.receipts) - {
        sha256(file.content) for file in found.files if file.content is not None
    }
    leftovers = tree.leftovers(root, _places(target, ()))
    leftovers += [_receipt(target, name) for name in sorted(stale)] + [*found.foreign]
    back = f"'loadplan revert {engine}' gives the release back"
    if FileState.UNKNOWN in states or found.foreign:
        state = "unknown"
        advice = (
            f"Something else changed files, or another version of loadplan did. apply "
            f"and revert stop at them; reinstall {target.name} {target.version}."
        )
    elif states == {FileState.PRISTINE}:
        state, advice = "pristine", f"'loadplan apply {engine}' patches it."
    elif states == {FileState.PATCHED}:
        state, advice = "patched", f"{back}."
    else:
        state = "mixed"
        advice = (
            "A run was killed, or another version of loadplan patched it. "
            f"'loadplan apply {engine}' finishes it, {back}."
        )
    return Status(state, advice, found.states(), tuple(leftovers))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _run(target: Target, root: Path, edits: list[Edit]) -> None:
    places = _places(target, edits)
    tree.clean(root, places)
    tree.commit(root, edits)
    tree.clean(root, places)


def _places(target: Target, edits: list[Edit] | tuple[()]) -> list[str]:
    """Every path that a run may write."""
    paths = {*target.files, *target.new_files(), *target.retired, target.record}
    paths |= {edit.path for edit in edits} | {_receipt(target, "any")}
    return sorted(paths)


def _receipt(target: Target, digest: str) -> str:
    return f"{target.core_folder}/originals/{digest}"


def _receipts(target: Target, root: Path) -> dict[str, bytes]:
    folder = root / _receipt(target, "any")
    tree.read(root, _receipt(target, "any"))
    names = sorted(file.name for file in folder.parent.glob("*"))
    found = {
        name: tree.read(root, _receipt(target, name))
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


def _check_known(target: Target, root: Path, found: Inspection) -> None:
    for file in found.files:
        if file.state is FileState.UNKNOWN:
            raise EngineError(f"{root / file.path}: {_unknown(target, file)}")
    if found.foreign:
        raise EngineError(
            f"{root / found.foreign[0]}: patched by another version of loadplan "
            "that this one does not know; revert with that version first. Nothing was "
            "changed"
        )


def _unknown(target: Target, file: Found) -> str:
    what = "no such file" if file.content is None else "changed by something else"
    release = f"{target.name} {target.version}"
    if file.touched:
        return (
            f"{what}, expected the file of {release} or its patched form; reinstall "
            f"{release}. Nothing was changed"
        )
    return (
        f"{what}, expected no file or loadplan's own; move it away. Nothing was changed"
    )


def _file_edits(files: list[Found], after: dict[str, bytes | None]) -> list[Edit]:
    return [
        Edit(path=file.path, before=file.content, after=after[file.path])
        for file in files
        if file.content != after[file.path]
    ]


def _receipt_edits(
    target: Target, found: Inspection, wanted: dict[str, bytes], *, add: bool
) -> list[Edit]:
    """Receipts come before what they stand for and go after it."""
    names = sorted(set(wanted) | set(found.receipts))
    edits = [
        Edit(_receipt(target, name), found.receipts.get(name), wanted.get(name))
        for name in names
    ]
    return [
        edit
        for edit in edits
        if edit.before != edit.after and (edit.after is not None) == add
    ]


def _record_edits(
    target: Target,
    found: Inspection,
    after: dict[str, bytes | None],
    new: dict[str, bytes],
) -> list[Edit]:
    if found.record is None:
        return []
    touched = {file.path: file for file in found.files if file.touched}
    known = set(found.receipts)
    for hashes in target.files.values():
        known |= set(hashes.values())
    rewritten = record.rewrite(
        found.record,
        changed={path: after[path] for path in touched},
        known=known,
        new=dict(sorted(new.items())),
        own={*target.new_files(), *(p for p, d in target.retired.items() if not d)},
        own_folder=target.core_folder,
    )
    if rewritten == found.record:
        return []
    return [Edit(path=target.record, before=found.record, after=rewritten)]
