"""How large InstantTensor makes its ring, for the stub. Sizes are in bytes."""

from __future__ import annotations

import itertools

from loadplan.standin.backends import Place
from loadplan.standin.caller import warn
from loadplan.standin.reads import Reads, required_buffer_size_for_io


def choose_ring_019(
    asked: int | None, reads: Reads, place: Place, tensor_sizes: list[int]
) -> int:
    """Bytes of the ring; one that was asked for never exceeds the tensors."""
    if asked is not None:
        return _resized(asked, tensor_sizes, useful=sum(tensor_sizes))
    in_flight = reads.chunk_size * reads.concurrency * reads.io_depth
    return max(ring_for_tensors(tensor_sizes), in_flight * place.world_size)


def choose_ring_022(
    asked: int | None, reads: Reads, place: Place, tensor_sizes: list[int]
) -> int:
    """Bytes of the ring; not selected tensors make it no smaller than the reads."""
    for_io = required_buffer_size_for_io(
        reads.chunk_size, reads.io_depth, place.world_size
    )
    if asked is None:
        size = max(ring_for_tensors(tensor_sizes), for_io)
    else:
        useful = max(sum(tensor_sizes), for_io)
        size = _resized(asked, tensor_sizes, useful=useful)
    if size > reads.budget:
        raise RuntimeError(
            f"buffer_size ({size} B) exceeds device memory budget ({reads.budget} B)"
        )
    return size


def _resized(asked: int, tensor_sizes: list[int], *, useful: int) -> int:
    largest = max(tensor_sizes, default=0)
    if asked < largest:
        warn(
            f"Enlarge buffer size from {asked} to {largest} to match the largest "
            "tensor size."
        )
        asked = largest
    if asked > useful:
        warn(f"Shrink buffer size from {asked} to {useful} to avoid memory waste.")
        asked = useful
    return asked


def ring_for_tensors(sizes: list[int]) -> int:
    """The smallest ring in which 90 % of the bytes can be read while others are used.

    A tensor overlaps with its predecessor when one predecessor and two of it fit.
    """
    if not sizes:
        return 4096
    needs = [(sizes[0], sizes[0])]
    needs += [(before + 2 * size, size) for before, size in itertools.pairwise(sizes)]
    enough, covered = sum(sizes) * 0.9, 0
    for need, size in sorted(needs):
        covered += size
        if covered >= enough:
            return max(need, *sizes)
    raise AssertionError("unreachable: all sizes together are more than 90 % of them")
