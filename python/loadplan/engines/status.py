"""What ``apply`` and ``revert`` would find, in words."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from loadplan.engines import tree
from loadplan.engines.survey import FileState, places, receipt_path, sha256, survey
from loadplan.engines.targets import Target


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


def status_of(target: Target, root: Path, *, engine: str | None = None) -> Status:
    """Explain what ``apply`` and ``revert`` would find; nothing is written.

    ``engine`` is what commands in the advice name, None the engine alone.
    """
    engine = engine or target.name
    found = survey(target, root)
    states = set(found.states().values())
    stale = set(found.receipts) - {
        sha256(file.content) for file in found.files if file.content is not None
    }
    leftovers = tree.leftovers(root, places(target, ()))
    leftovers += [receipt_path(target, name) for name in sorted(stale)]
    leftovers += found.foreign
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
