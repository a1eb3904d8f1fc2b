"""InstantTensor's ring of device memory: how large it will be, how deep it needs to be.

The rules and defaults are those of InstantTensor 0.2.2 (and, where they agree, 0.1.9),
read from its source and compared with the library on a GPU.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .header import FileHeader, LoadPlanError
from .plan import LoadPlan, PlannedTensor, Route

# Bytes of one read, for files on disk and in memory.
READ_BYTES = 8 << 20
_READ_IN_MEMORY_BYTES = 2 << 20

# Reads in flight over all ranks for files on disk, and the fewest of one rank. The ring
# has room for every read in flight.
READS_IN_FLIGHT = 512
_FEWEST_READS = 3

# Share of the free device memory that the ring may take.
_MAX_FREE_MEM_USAGE = 0.5

# Any of these sizes the ring by itself.
_SIZING_OPTIONS = ("backend", "buffer_size", "chunk_size", "io_depth")


def option(options: Mapping[str, Any], name: str) -> Any:
    """An option as InstantTensor resolves it: argument, INSTANTTENSOR_*, else None."""
    value = options.get(name)
    return os.environ.get(f"INSTANTTENSOR_{name.upper()}") if value is None else value


def ring_budget(free_bytes: int, options: Mapping[str, Any]) -> int:
    """The most bytes that the ring may take of ``free_bytes`` of device memory.

    Raises:
        LoadPlanError: the share that the operator set is no share.
    """
    given = option(options, "max_free_mem_usage")
    try:
        share = _MAX_FREE_MEM_USAGE if given is None else float(given)
    except (TypeError, ValueError):
        share = math.nan
    if not 0 < share <= 1:
        raise LoadPlanError(
            f"max_free_mem_usage (or INSTANTTENSOR_MAX_FREE_MEM_USAGE) is {given!r}, "
            "expected a number above 0 and not above 1"
        )
    return int(free_bytes * share)


def plan_within(
    budget: int | None, plan: Callable[[Mapping[str, str]], LoadPlan]
) -> LoadPlan:
    """The plan whose device tensors fit: none above ``budget`` bytes, nor the ring.

    ``plan`` makes it, with those names kept on the host that it is given, each with the
    reason. Where InstantTensor's ring for the rest would be too large, the largest make
    way, all of one size at once. None sets no limit.
    """
    kept: dict[str, str] = {}
    made = plan(kept)
    while budget is not None and (too_large := _too_large(made, budget)):
        kept |= {
            entry.tensor.name: f"{entry.tensor.nbytes} B, more than the device has "
            "room for at once"
            for entry in too_large
        }
        made = plan(kept)
    return made


def _too_large(plan: LoadPlan, budget: int) -> list[PlannedTensor]:
    on_device = (Route.READ, Route.STREAM)
    found = [
        entry
        for entry in plan.entries
        if entry.route in on_device and entry.tensor.nbytes > budget
    ]
    streamed = [] if found else plan.of(Route.STREAM)
    # The library takes files by name and tensors by offset.
    streamed.sort(key=lambda entry: (entry.file.path, entry.tensor.begin))
    # A file that holds one of those found can no longer be streamed.
    while ring_bytes([entry.tensor.nbytes for entry in streamed]) > budget:
        largest = max(entry.tensor.nbytes for entry in streamed)
        making_way = [e for e in streamed if e.tensor.nbytes == largest]
        paths = {entry.file.path for entry in making_way}
        streamed = [entry for entry in streamed if entry.file.path not in paths]
        found += making_way
    return found


def ring_bytes(sizes: Sequence[int]) -> int:
    """The ring that InstantTensor chooses for tensors of ``sizes`` bytes, in its order.

    It wants 90 % of the bytes read while others are used: a tensor needs room for its
    predecessor and twice itself. It never takes less than the largest.
    """
    if not sizes:
        return 0
    needs = [(sizes[0], sizes[0])]
    needs += [(before + 2 * size, size) for before, size in itertools.pairwise(sizes)]
    needs.sort()
    covered = itertools.accumulate(size for _, size in needs)
    enough = sum(sizes) * 0.9
    ring = next((n for (n, _), c in zip(needs, covered, strict=True) if c >= enough), 0)
    return max(ring, *sizes)


def small_io_depth(
    files: Sequence[FileHeader], *, world_size: int, options: Mapping[str, Any]
) -> int | None:
    """The depth at which every read is in flight at once, None to keep the default.

    The default ring is 4 GiB on disk whatever is read. Fewer reads than it has room for
    need no more room than their own. Options of the user win.
    """
    if any(option(options, name) is not None for name in _SIZING_OPTIONS):
        return None
    in_memory = any(file.in_memory for file in files)
    read_bytes = _READ_IN_MEMORY_BYTES if in_memory else READ_BYTES
    # A file's reads start on their own boundary, so it can take one more.
    reads = sum(-(-file.payload_bytes // read_bytes) + 1 for file in files)
    depth = max(-(-reads // world_size), _FEWEST_READS)
    # In memory the default follows from the processors; it is never below the fewest.
    default = _FEWEST_READS
    if not in_memory:
        default = max(READS_IN_FLIGHT // world_size, _FEWEST_READS)
    return depth if depth <= default else None
