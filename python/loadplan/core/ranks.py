"""Ranks that load together agree: before the first collective read and after the last.

Only the group that the engine passed is used. Without one, or alone, there is no step.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from .header import FileHeader, LoadPlanError, read_headers, read_index
from .plan import LoadPlan

logger = logging.getLogger(__name__)

# How long a rank waits for the others before it says which are absent.
_PATIENCE_S = 30.0

# By the name of a group, how many exchanges this process has begun on it.
_exchanges: collections.Counter[str] = collections.Counter()

Result = TypeVar("Result")


class PeerFailure(LoadPlanError):
    """Another rank failed, and tells why at the next exchange."""


def together(
    group: dist.ProcessGroup | None, step: str, work: Callable[[], Result]
) -> list[Result]:
    """Run ``work`` on every rank of ``group`` and give each rank all results, by rank.

    Results are pickled. Every rank must call it, in the same ``step``: one whose load
    was ended by something else and begins anew must not be taken for a peer.

    Raises:
        LoadPlanError: another rank's ``work`` raised; the text names the rank.
        Exception: what this rank's own ``work`` raised.
    """
    if group is None or dist.get_world_size(group) == 1:
        return [work()]
    failure = result = None
    try:
        result = work()
    except Exception as error:
        failure = error
    told = None
    if failure is not None and not isinstance(failure, PeerFailure):
        told = f"{type(failure).__name__}: {failure}"
    answers: list[Any] = [None] * dist.get_world_size(group)
    try:
        with _absent_ranks_named(group, step):
            dist.all_gather_object(answers, (step, told, result), group=group)
    except Exception as error:
        # A rank is gone. What failed here came first.
        if failure is not None:
            raise failure from error
        raise
    if told is not None:
        raise failure
    for rank, (at, text, _) in enumerate(answers):
        if text is not None:
            raise LoadPlanError(f"rank {rank} of {len(answers)} failed: {text}")
        if at != step:
            raise LoadPlanError(
                f"rank {rank} of {len(answers)} is at {at!r}, this one at {step!r}; "
                "one of them ended its load early, see its log"
            )
    if failure is not None:
        raise failure
    return [result for _, _, result in answers]


@contextlib.contextmanager
def _absent_ranks_named(group: dist.ProcessGroup, step: str) -> Iterator[None]:
    """Log which ranks have not come to ``step`` when this one has waited for long.

    Only a log: how long to wait at all is the group's own timeout.
    """
    _exchanges[group.group_name] += 1
    keys = [
        f"loadplan/{_exchanges[group.group_name]}/{step}/{rank}"
        for rank in range(dist.get_world_size(group))
    ]
    # Older releases of torch do not tell the store; then nobody is named.
    store = group.get_group_store() if hasattr(group, "get_group_store") else None
    if store is not None:
        store.set(keys[dist.get_rank(group)], "here")

    def tell() -> None:
        absent = "of others"
        if store is not None:
            missing = [str(r) for r, key in enumerate(keys) if not store.check([key])]
            absent = ", ".join(missing)
        logger.warning(
            "Waiting for %d s at %r for rank %s of %d; see the log of that rank.",
            _PATIENCE_S,
            step,
            absent,
            len(keys),
        )

    timer = threading.Timer(_PATIENCE_S, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What a rank's machine allows and another's may not; reduced before routing.

    ``device_budget`` is in bytes, None where there is no limit. ``old_reader`` says
    that InstantTensor is older than 0.2.
    """

    device_budget: int | None = None
    old_reader: bool = False


def plan_together(
    paths: Sequence[str],
    *,
    folder: str,
    group: dist.ProcessGroup | None,
    machine: Callable[[], Machine],
    decide: Callable[[list[FileHeader], dict[str, str] | None, Machine], LoadPlan],
) -> LoadPlan:
    """Read the headers and make one plan that all ranks of ``group`` follow.

    ``folder`` holds the index and may lie elsewhere on another node. ``machine`` tells
    what this rank allows. ``decide`` makes the plan from the headers, the index and
    what all ranks allow, and raises if this one must not follow it. What fails on one
    rank fails on all.

    Raises:
        LoadPlanError: a rank failed, or the ranks see different checkpoints.
    """
    headers: list[FileHeader] = []
    index: list[dict[str, str] | None] = []
    node = socket.gethostname()

    def look() -> tuple[str, Machine, dict[str, bool]]:
        headers.extend(read_headers(paths))
        index.append(read_index(folder))
        media = {os.path.relpath(h.path, folder): h.in_memory for h in headers}
        return node, machine(), media

    seen = together(group, "the headers", look)
    budgets = [m.device_budget for _, m, _ in seen if m.device_budget is not None]
    allowed = Machine(
        device_budget=min(budgets, default=None),
        old_reader=any(m.old_reader for _, m, _ in seen),
    )
    media = [in_memory for _, _, in_memory in seen]
    plans: list[LoadPlan] = []

    def make() -> dict[str, str]:
        reduced = [_reduced(header, folder, media) for header in headers]
        plans.append(decide(reduced, index[0], allowed))
        digests = file_digests(plans[0])
        return {os.path.relpath(path, folder): text for path, text in digests.items()}

    _compare(together(group, "the plan", make))
    node_ranks = sum(other == node for other, _, _ in seen)
    return dataclasses.replace(plans[0], node_ranks=node_ranks)


def file_digests(plan: LoadPlan) -> dict[str, str]:
    """By path, a digest of size, header and routes: equal on ranks that agree."""
    texts: dict[str, list[str]] = {}
    for file, tensor, route, _ in plan.entries:
        texts.setdefault(file.path, [str(file.size)]).append(
            f"{tensor.name} {tensor.dtype} {tensor.shape} {tensor.begin} {route.value}"
        )
    return {
        path: hashlib.sha256("\n".join(lines).encode()).hexdigest()
        for path, lines in texts.items()
    }


def _reduced(
    header: FileHeader, folder: str, media: Sequence[dict[str, bool]]
) -> FileHeader:
    """``header`` with the medium on which all ranks have it, None if they differ."""
    name = os.path.relpath(header.path, folder)
    found = {in_memory[name] for in_memory in media if name in in_memory}
    if found == {header.in_memory}:
        return header
    return dataclasses.replace(header, in_memory=None)


def _compare(digests: Sequence[dict[str, str]]) -> None:
    first = digests[0]
    for rank, other in enumerate(digests):
        for shard in sorted(first.keys() | other.keys()):
            if first.get(shard) != other.get(shard):
                lacking = [r for r, d in ((0, first), (rank, other)) if shard not in d]
                what = (
                    f"rank {lacking[0]} has no shard {shard!r}"
                    if lacking
                    else f"shard {shard!r} differs in size, header or routes"
                )
                raise LoadPlanError(
                    f"rank {rank} would load something else than rank 0: {what}; "
                    "give every node the same checkpoint and configuration"
                )
