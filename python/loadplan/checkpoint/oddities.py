"""What is unusual in a checkpoint, and what a load will do about it."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Sequence

from loadplan.checkpoint.files import Checkpoint
from loadplan.core.plan import LoadPlan, PlannedTensor, Route

_DONE = {
    Route.SKIP: "left out, nothing is read",
    Route.HOST: "stays in host memory, each rank takes its rows",
    Route.READ: "read apart from the stream, to the same place",
}
_SIZE = re.compile(r"\A\d+ B, ")
# Not odd: what the placement and the draft ask for.
_USUAL = ("host-resident", "not wanted by this model")


@dataclasses.dataclass(frozen=True, slots=True)
class Oddity:
    """``what`` was found in ``files`` (relative names), and what is ``done`` about it.

    ``tensors`` and ``nbytes`` (bytes) are 0 where it is about files alone.
    """

    what: str
    files: tuple[str, ...]
    tensors: int
    nbytes: int
    done: str


def find(checkpoint: Checkpoint, plans: Sequence[LoadPlan]) -> tuple[Oddity, ...]:
    """Everything odd: in the folder, in the headers, in how the plans depart."""
    found = [*_in_folder(checkpoint), *_in_headers(checkpoint)]
    for plan in plans:
        found += _departures(checkpoint, plan)
    # A draft's plan departs for the same reasons as the model's.
    return tuple(dict.fromkeys(found))


def _in_folder(checkpoint: Checkpoint) -> Iterator[Oddity]:
    if checkpoint.unindexed:
        in_draft = {checkpoint.relative(f.path) for f in checkpoint.draft_headers}
        for names, done in (
            ([n for n in checkpoint.unindexed if n not in in_draft], "not loaded"),
            (
                [n for n in checkpoint.unindexed if n in in_draft],
                "loaded only by a draft",
            ),
        ):
            if names:
                yield _about_files("a file that the index does not name", names, done)
    if checkpoint.hidden:
        yield _about_files("a hidden file", checkpoint.hidden, "not listed, not opened")
    if checkpoint.weight_map is None and len(checkpoint.headers) > 1:
        yield _about_files(
            "several files without an index",
            [checkpoint.relative(file.path) for file in checkpoint.headers],
            "all are loaded; one name in two files would be an error",
        )


def _in_headers(checkpoint: Checkpoint) -> Iterator[Oddity]:
    empty = [f for f in checkpoint.headers if not f.tensors]
    if empty:
        names = [checkpoint.relative(file.path) for file in empty]
        yield _about_files("a file without tensors", names, "left out")
    by_identity: dict[object, list[str]] = {}
    for file in checkpoint.headers:
        key = (file.identity, file.size)
        by_identity.setdefault(key, []).append(checkpoint.relative(file.path))
    for names in by_identity.values():
        if len(names) > 1:
            yield _about_files("one file under several names", names, "loaded once")
    if checkpoint.weight_map is None:
        return
    unknown = [
        (file, tensor)
        for file in checkpoint.headers
        for tensor in file.tensors
        if tensor.name not in checkpoint.weight_map
    ]
    if unknown:
        yield Oddity(
            what="a tensor that the index does not name",
            files=_unique(checkpoint.relative(file.path) for file, _ in unknown),
            tensors=len(unknown),
            nbytes=sum(tensor.nbytes for _, tensor in unknown),
            done="taken from the one file that has it",
        )


def _departures(checkpoint: Checkpoint, plan: LoadPlan) -> Iterator[Oddity]:
    groups: dict[tuple[Route, str], list[PlannedTensor]] = {}
    for entry in plan.entries:
        if entry.route is not Route.STREAM and entry.reason not in _USUAL:
            # The plan's reason for one that is too large begins with its size: what
            # is odd is the same for all of them.
            reason = _SIZE.sub("", entry.reason)
            groups.setdefault((entry.route, reason), []).append(entry)
    for (route, reason), entries in groups.items():
        yield Oddity(
            what=reason.replace(f"{checkpoint.folder}/", ""),
            files=_unique(checkpoint.relative(entry.file.path) for entry in entries),
            tensors=len(entries),
            nbytes=sum(entry.tensor.nbytes for entry in entries),
            done=_DONE[route],
        )


def _about_files(what: str, names: Iterable[str], done: str) -> Oddity:
    return Oddity(what=what, files=tuple(names), tensors=0, nbytes=0, done=done)


def _unique(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))
