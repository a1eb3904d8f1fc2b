"""Apply a patch series to an engine's files, and take it back: whole or not at all."""

from __future__ import annotations

from pathlib import Path

from loadplan.engines import record, tree
from loadplan.engines.survey import (
    FileState,
    Found,
    Survey,
    places,
    receipt_path,
    sha256,
    survey,
)
from loadplan.engines.targets import Target
from loadplan.engines.tree import Edit
from loadplan.errors import EngineError


def plan_apply(target: Target, root: Path) -> list[Edit]:
    """What ``apply`` would change below ``root``; nothing is written.

    Raises:
        EngineError: a file is unknown, or a patch does not give what it should.
    """
    found = survey(target, root)
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
    new |= {receipt_path(target, digest): before for digest, before in wanted.items()}
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
    found = survey(target, root)
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


def _run(target: Target, root: Path, edits: list[Edit]) -> None:
    written = places(target, edits)
    tree.clean(root, written)
    tree.commit(root, edits)
    tree.clean(root, written)


def _check_known(target: Target, root: Path, found: Survey) -> None:
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
    target: Target, found: Survey, wanted: dict[str, bytes], *, add: bool
) -> list[Edit]:
    """Receipts come before what they stand for and go after it."""
    names = sorted(set(wanted) | set(found.receipts))
    edits = [
        Edit(receipt_path(target, name), found.receipts.get(name), wanted.get(name))
        for name in names
    ]
    return [
        edit
        for edit in edits
        if edit.before != edit.after and (edit.after is not None) == add
    ]


def _record_edits(
    target: Target,
    found: Survey,
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
