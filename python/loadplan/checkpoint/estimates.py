"""How much memory a load takes on one GPU and on one host, from headers and the plan.

An estimate: how an engine splits a model shows only in the running engine. Matrices
count as split evenly over the GPUs, everything smaller as whole on each. What the
runtime, kernels and the KV cache take is not in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from loadplan.core.broadcast import LEAST_SHARED_BYTES, SHARED_BYTES
from loadplan.core.header import FileHeader, TensorHeader
from loadplan.core.plan import LoadPlan, Route
from loadplan.core.ring import (
    READ_BYTES,
    READS_IN_FLIGHT,
    ring_budget,
    ring_bytes,
    small_io_depth,
)
from loadplan.core.spans import (
    PIECE_BYTES,
    PIECES_IN_FLIGHT,
    Span,
    make_pieces,
    make_spans,
)
from loadplan.units import gib

# What InstantTensor keeps in flight by itself, over all ranks: on disk, in memory (at
# most: there it follows from the processors).
_RING = READS_IN_FLIGHT * READ_BYTES
_RING_IN_MEMORY = 192 << 20

WEIGHTS = "weights, about"
RING = "InstantTensor's ring"
ARRIVING = "tensors on arrival"
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


def table_on_host(table: TensorHeader, *, tp: int, ranks: int) -> int:
    """Bytes of ``table`` on a host that has ``ranks`` of the group's ``tp`` ranks.

    As the engine's own check counts, before it builds a table: each rank holds equal
    rows, rounded up. A table that all ranks of a host share is made of the same parts.
    """
    rows = table.shape[0] if table.shape else 0
    if not rows:
        return table.nbytes
    return ranks * -(-rows // tp) * (table.nbytes // rows)


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
            in_flight = min(in_flight, depth * tp * READ_BYTES)
    streamed = [
        entry.tensor
        for entry in sorted(
            plan.of(Route.STREAM), key=lambda e: (e.file.path, e.tensor.begin)
        )
    ]
    return _gpu(
        streamed,
        apart=[entry.tensor for entry in plan.of(Route.READ)],
        spans=span_bytes(make_spans(plan.of(Route.READ)), tp=tp),
        weights=weights,
        in_flight=in_flight,
        limit=limit,
    )


def span_bytes(spans: Sequence[Span], *, tp: int) -> int:
    """What READ takes of a GPU at once, beside the weights."""
    total = sum(span.nbytes for span in spans)
    # One is filled while the last one is used.
    under_way = 2 * max((span.nbytes for span in spans), default=0)
    if tp > 1 and total >= LEAST_SHARED_BYTES:
        # Ranks that share much keep more of them under way.
        under_way = max(under_way, SHARED_BYTES)
    return min(total, under_way)


def read_buffers(plan: LoadPlan) -> int:
    """Host memory of one rank that READ goes through."""
    pieces = sum(1 for _ in make_pieces(make_spans(plan.of(Route.READ))))
    return min(pieces, PIECES_IN_FLIGHT) * PIECE_BYTES


def _gpu(
    streamed: Sequence[TensorHeader],
    *,
    apart: Sequence[TensorHeader] = (),
    spans: int = 0,
    weights: int,
    in_flight: int,
    limit: int | None,
) -> Memory:
    needed = ring_bytes([tensor.nbytes for tensor in streamed])
    allowed = budget(limit, weights)
    if allowed is not None:
        # Reads in flight give way to the budget, a ring for the tensors does not.
        in_flight = min(in_flight, allowed)
    ring = max(needed, in_flight)
    whole = max((tensor.nbytes for tensor in streamed), default=0)
    # READ begins when the ring is gone: only what it takes beyond it comes on top.
    parts = {WEIGHTS: weights, RING: ring, ARRIVING: max(spans - ring, whole)}
    problem, blamed = "", streamed
    if limit is not None:
        if weights > limit:
            blamed = [*streamed, *apart]
            problem = f"the weights alone take {gib(weights)} of {gib(limit)}"
        elif needed > allowed:
            problem = (
                f"InstantTensor's ring needs {gib(needed)} for it and may take "
                f"{gib(allowed)}, half of what the weights leave"
            )
        elif sum(parts.values()) > limit and spans - ring > whole:
            blamed = apart
            problem = f"it is read with others, {gib(spans)} at once beside the weights"
        elif sum(parts.values()) > limit:
            problem = f"it arrives whole, {gib(whole)}, beside the weights and the ring"
    breaks = ""
    if problem:
        largest = max(blamed, key=lambda tensor: tensor.nbytes, default=None)
        breaks = "the model" if largest is None else largest.name
    return Memory(parts=parts, limit=limit, breaks=breaks, problem=problem)


def host(
    tables: Sequence[TensorHeader],
    *,
    tp: int,
    ranks: int,
    buffers: int,
    limit: int | None,
) -> Memory:
    """One host with ``ranks`` of ``tp`` ranks: tables, and ``buffers`` of all ranks."""
    held = [table_on_host(table, tp=tp, ranks=ranks) for table in tables]
    parts = {TABLES: sum(held), BUFFERS: buffers}
    breaks = problem = ""
    if limit is not None and sum(parts.values()) > limit:
        problem = f"the host needs {gib(sum(parts.values()))} and has {gib(limit)}"
        breaks, filled = "the read buffers", 0
        for tensor, nbytes in zip(tables, held, strict=True):
            filled += nbytes
            if filled > limit:
                breaks = tensor.name
                break
    return Memory(parts=parts, limit=limit, breaks=breaks, problem=problem)
