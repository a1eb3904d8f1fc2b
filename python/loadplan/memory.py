"""How much memory a load takes on one GPU and on one host, from headers and the plan.

An estimate: how an engine splits a model shows only in the running engine. Matrices
count as split evenly over the GPUs, everything smaller as whole on each. What the
runtime, kernels and the KV cache take is not in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .core import (
    FileHeader,
    LoadPlan,
    Route,
    TensorHeader,
    ring_budget,
    small_io_depth,
)
from .core.ring import ring_bytes
from .units import gib

# What InstantTensor keeps in flight by itself, over all ranks: on disk, in memory (at
# most: there it follows from the processors).
_READ_BYTES = 8 << 20
_RING = 512 * _READ_BYTES
_RING_IN_MEMORY = 192 << 20

# Pinned buffers of one rank, where tensors are read one by one.
_READ_BUFFERS = 128 << 20

WEIGHTS = "weights, about"
RING = "InstantTensor's ring"
WHOLE = "one whole tensor"
TABLES = "Engram tables"
BUFFERS = "read buffers"


@dataclasses.dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one GPU or host at the load's peak.

    ``limit`` is what there is, None if nobody said. ``breaks`` is the tensor for which
    there is no room and ``problem`` why, both empty if all fits.
    """

    parts: dict[str, int]
    limit: int | None
    breaks: str
    problem: str

    @property
    def total(self) -> int:
        return sum(self.parts.values())

    @property
    def fits(self) -> bool | None:
        return None if self.limit is None else not self.problem


def share(tensor: TensorHeader, tp: int) -> int:
    """Bytes of ``tensor`` that live on one of ``tp`` GPUs."""
    return -(-tensor.nbytes // tp) if len(tensor.shape) > 1 else tensor.nbytes


def budget(limit: int | None, weights: int) -> int | None:
    """What InstantTensor's ring may take once ``weights`` bytes are allocated."""
    return None if limit is None else ring_budget(max(limit - weights, 0), {})


def stock_gpu(
    files: Sequence[FileHeader], *, weights: int, limit: int | None
) -> Memory:
    """One GPU when every file is streamed whole."""
    tensors = [
        tensor
        for file in sorted(files, key=lambda file: file.path)
        for tensor in file.tensors
    ]
    depth = _RING_IN_MEMORY if all(f.in_memory for f in files) else _RING
    return _gpu(tensors, weights=weights, in_flight=depth, limit=limit)


def plan_gpu(plan: LoadPlan, *, weights: int, tp: int, limit: int | None) -> Memory:
    """One GPU when ``plan`` is carried out."""
    files = plan.streamed()
    in_flight = 0
    if files:
        depth = small_io_depth(files, world_size=tp, options={})
        in_flight = _RING_IN_MEMORY if any(f.in_memory for f in files) else _RING
        if depth is not None:
            in_flight = min(in_flight, depth * tp * _READ_BYTES)
    streamed = [
        entry.tensor
        for entry in sorted(
            plan.of(Route.STREAM), key=lambda e: (e.file.path, e.tensor.begin)
        )
    ]
    apart = [entry.tensor for entry in plan.of(Route.READ)]
    return _gpu(
        streamed, apart=apart, weights=weights, in_flight=in_flight, limit=limit
    )


def _gpu(
    streamed: Sequence[TensorHeader],
    *,
    apart: Sequence[TensorHeader] = (),
    weights: int,
    in_flight: int,
    limit: int | None,
) -> Memory:
    needed = ring_bytes([tensor.nbytes for tensor in streamed])
    allowed = budget(limit, weights)
    if allowed is not None:
        # Reads in flight give way to the budget, a ring for the tensors does not.
        in_flight = min(in_flight, allowed)
    arriving = [*streamed, *apart]
    whole = max((tensor.nbytes for tensor in arriving), default=0)
    parts = {WEIGHTS: weights, RING: max(needed, in_flight), WHOLE: whole}
    problem = ""
    if limit is not None:
        if weights > limit:
            problem = f"the weights alone take {gib(weights)} of {gib(limit)}"
        elif needed > allowed:
            problem = (
                f"InstantTensor's ring needs {gib(needed)} for it and may take "
                f"{gib(allowed)}, half of what the weights leave"
            )
        elif sum(parts.values()) > limit:
            problem = f"it arrives whole, {gib(whole)}, beside the weights and the ring"
    breaks = ""
    if problem:
        breaks = next((t.name for t in arriving if t.nbytes == whole), "the model")
    return Memory(parts=parts, limit=limit, breaks=breaks, problem=problem)


def host(
    tables: Sequence[TensorHeader],
    *,
    table_share: float,
    readers: int,
    limit: int | None,
) -> Memory:
    """One host: its share of the tables, and buffers of ``readers`` ranks."""
    parts = {
        TABLES: int(sum(tensor.nbytes for tensor in tables) * table_share),
        BUFFERS: readers * _READ_BUFFERS,
    }
    breaks = problem = ""
    if limit is not None and sum(parts.values()) > limit:
        problem = f"the host needs {gib(sum(parts.values()))} and has {gib(limit)}"
        breaks, filled = "the read buffers", parts[BUFFERS]
        for tensor in tables:
            breaks = tensor.name
            filled += int(tensor.nbytes * table_share)
            if filled > limit:
                break
    return Memory(parts=parts, limit=limit, breaks=breaks, problem=problem)
