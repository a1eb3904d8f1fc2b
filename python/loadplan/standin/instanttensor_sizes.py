"""How InstantTensor chooses backend, read sizes and ring, for the stub.

Sizes are in bytes, depths in reads of one rank, texts those that users of the library
see. A choice has three steps: settings from arguments and environment, how to read,
how large the ring is. `_019` and `_022` are the rules of the releases 0.1.9 and 0.2.2.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

_MIB = 1 << 20
_MAX_IO_DEPTH = 1024
_MAX_CHUNK_SIZE = 1024 * _MIB


class Backend(Enum):
    """How file bytes are read; the stub only lets it decide sizes."""

    AIO = 0
    AIO_BUFFERED = 1
    URING = 2
    URING_BUFFERED = 3
    CUFILE = 4
    MMAP = 5


class BackendPolicy(Enum):
    """A name that stands for several backends."""

    BUFFERED = "BUFFERED"


_DIRECT = (Backend.URING, Backend.AIO)
_IN_MEMORY = (Backend.MMAP, Backend.URING_BUFFERED, Backend.AIO_BUFFERED)
_THREADED = (Backend.MMAP, Backend.CUFILE)
_BUFFERED_019 = (Backend.URING_BUFFERED, Backend.AIO_BUFFERED, Backend.MMAP)
_BUFFERED_022 = (Backend.URING_BUFFERED, Backend.MMAP)


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of a caller or the environment; None leaves one to the library."""

    buffer_size: int | None
    chunk_size: int | None
    concurrency: int | None
    io_depth: int | None
    max_free_mem_usage: float | None
    backend: Any


@dataclass(frozen=True, slots=True)
class Place:
    """Where a choice is made.

    `least` gives every rank the smallest of the ranks' values (a collective call).
    """

    in_memory: bool
    world_size: int
    free_memory: int
    least: Callable[[int], int]


@dataclass(frozen=True, slots=True)
class Reads:
    """How the files are read; `budget` is the most that the ring may take."""

    backend: Backend
    chunk_size: int
    concurrency: int
    io_depth: int
    budget: int


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the line of the first caller outside the stub's modules."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_stub(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_stub(module: str) -> bool:
    return module.startswith(f"{__package__}.instanttensor")


def _or(chosen: Any, default: Any) -> Any:
    return default if chosen is None else chosen


# Settings.


def settings_from(arguments: Mapping[str, Any]) -> Settings:
    """Let an argument win over its INSTANTTENSOR_* variable."""
    chosen = {}
    for name, parse in _ENVIRONMENT.items():
        text = os.environ.get(f"INSTANTTENSOR_{name.upper()}")
        given = arguments[name]
        chosen[name] = parse(text) if given is None and text is not None else given
    return Settings(**chosen)


def _backends_named(text: str) -> list[Backend | BackendPolicy]:
    known = {**Backend.__members__, **BackendPolicy.__members__}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(
                f"backend={name} is invalid. Available backends: {known.keys()}"
            )
    if not names:
        raise ValueError("INSTANTTENSOR_BACKEND cannot be empty")
    return [known[name] for name in names]


_ENVIRONMENT: dict[str, Callable[[str], Any]] = {
    "buffer_size": int,
    "chunk_size": int,
    "concurrency": int,
    "io_depth": int,
    "max_free_mem_usage": float,
    "backend": _backends_named,
}


# Backends.


def _candidates(asked: Any, buffered: tuple[Backend, ...]) -> list[Backend]:
    """The backends that `asked` names, policies replaced by what they stand for."""
    listed = asked if isinstance(asked, list) else [asked]
    if not listed:
        raise ValueError(
            "backend cannot be an empty list; use None to select the default backend "
            "candidates"
        )
    if not all(isinstance(one, Backend | BackendPolicy) for one in listed):
        raise TypeError("backend must be a `Backend`, `BackendPolicy`, or list of them")
    groups = (buffered if one is BackendPolicy.BUFFERED else (one,) for one in listed)
    return [backend for group in groups for backend in group]


def _first_usable(candidates: list[Backend], place: Place) -> Backend | None:
    usable = (b for b in candidates if not place.in_memory or b in _IN_MEMORY)
    return next(usable, None)


def _backend_019(asked: Any, place: Place) -> Backend:
    if asked is None:
        return Backend.MMAP if place.in_memory else _DIRECT[0]
    candidates = _candidates(asked, _BUFFERED_019)
    backend = _first_usable(candidates, place)
    if backend is None:
        names = [backend.name for backend in candidates]
        reasons = [f"{name} is not supported for this filesystem" for name in names]
        raise RuntimeError(
            f"No available backend found from candidates [{', '.join(names)}]. "
            f"{'; '.join(reasons)}"
        )
    return backend


def _backend_022(asked: Any, place: Place) -> Backend:
    if asked is None:
        return Backend.MMAP if place.in_memory else _DIRECT[0]
    backend = _first_usable(_candidates(asked, _BUFFERED_022), place)
    if backend is None:
        raise RuntimeError("No available backend was found among candidates []. ")
    return backend


# Reads.


def choose_reads_019(asked: Settings, place: Place) -> Reads:
    """Choose the reads; depth gives way to the budget first, then threads."""
    ranks = place.world_size
    backend = _backend_019(asked.backend, place)
    chunk, threads, depth = 8 * _MIB, 1, max(512 // ranks, 3)
    if place.in_memory:
        cpus = min(32, os.cpu_count() or 1)
        chunk, threads, depth = 2 * _MIB, max(cpus // ranks, 1), 3
    elif backend is Backend.CUFILE:
        chunk, threads, depth = 8 * _MIB, max(32 // ranks, 1), 16
    chunk = _or(asked.chunk_size, chunk)
    threads = _or(asked.concurrency, threads)
    depth = _or(asked.io_depth, depth)
    budget = int(place.free_memory * _or(asked.max_free_mem_usage, 0.5))
    budget = place.least(budget)

    if chunk * threads * depth * ranks > budget:
        fitting = max(budget // (chunk * threads * ranks), 3)
        if fitting != depth:
            warn(f"Shrink io_depth from {depth} to {fitting} due to memory limit.")
            depth = fitting
    if chunk * threads * depth * ranks > budget:
        fitting = max(budget // (chunk * depth * ranks), 1)
        if fitting != threads:
            warn(f"Shrink concurrency from {threads} to {fitting} due to memory limit.")
            threads = fitting
    if chunk * threads * depth * ranks > budget:
        raise RuntimeError("Device memory is not enough")
    return Reads(backend, chunk, threads, depth, budget)


def choose_reads_022(asked: Settings, place: Place) -> Reads:
    """Choose the reads; a depth that nobody asked for fits itself to the buffer."""
    ranks = place.world_size
    backend = _backend_022(asked.backend, place)
    asked_threads = _threads_022(asked.concurrency, backend)
    workers = max(min(32, _usable_cpus()) // ranks - 4, 1)
    chunk, threads = 8 * _MIB, 0
    if backend is Backend.MMAP:
        chunk, threads = 2 * _MIB, _or(asked_threads, workers)
        depth = 3 * threads
    elif backend is Backend.CUFILE:
        threads = _or(asked_threads, max(32 // ranks, 1))
        depth = 2 * threads
    elif backend in _DIRECT:
        depth = max(512 // ranks, 3)
    else:
        depth = workers
    chunk, depth = _or(asked.chunk_size, chunk), _or(asked.io_depth, depth)
    _check_reads_022(chunk, depth)

    one_read = required_buffer_size_for_io(chunk, 1, ranks)
    if asked.buffer_size is not None:
        depth = _fit_buffer_022(asked, place, chunk, depth)
    budget = _budget_022(asked.max_free_mem_usage, place)
    fitting = budget // one_read
    if fitting < 1:
        raise RuntimeError(
            f"Device memory budget ({budget} B) is too small for one I/O operation; at "
            f"least {one_read} B is required"
        )
    if depth > fitting:
        warn(f"Shrink io_depth from {depth} to {fitting} due to memory limit.")
        depth = fitting
    return Reads(backend, chunk, threads, depth, budget)


def _threads_022(asked: int | None, backend: Backend) -> int | None:
    """What the caller asked for where threads read, 0 where the kernel does."""
    if asked is None:
        return None
    if asked < 0:
        raise ValueError("concurrency must not be negative")
    if backend not in _THREADED:
        if asked > 0:
            warn(
                f"Backend {backend.name} does not support concurrency; overriding "
                f"concurrency={asked} to 0."
            )
        return 0
    if asked == 0:
        raise ValueError(
            f"concurrency must be greater than zero for backend {backend.name}"
        )
    return asked


def _check_reads_022(chunk: int, depth: int) -> None:
    if chunk <= 0:
        raise ValueError("chunk_size must be greater than zero")
    if required_buffer_size_for_io(chunk, 1, 1) > _MAX_CHUNK_SIZE:
        raise ValueError(
            f"chunk_size must be no greater than {_MAX_CHUNK_SIZE} B after page "
            "alignment"
        )
    if depth <= 0:
        raise ValueError("io_depth must be greater than zero")
    if depth > _MAX_IO_DEPTH:
        raise ValueError(f"io_depth must not exceed {_MAX_IO_DEPTH}")


def _fit_buffer_022(asked: Settings, place: Place, chunk: int, depth: int) -> int:
    """Shrink a depth that nobody asked for; refuse one that somebody did."""
    size = asked.buffer_size
    if size <= 0:
        raise ValueError("buffer_size must be greater than zero")
    one_read = required_buffer_size_for_io(chunk, 1, place.world_size)
    explicit = asked.io_depth is not None
    needed = one_read * depth if explicit else one_read
    if needed > size:
        what = f"io_depth={depth}" if explicit else "one I/O operation"
        raise ValueError(
            f"buffer_size ({size} B) is too small for {what}; at least {needed} B is "
            f"required for chunk_size={chunk} and world_size={place.world_size}"
        )
    fitting = size // one_read
    if depth > fitting:
        warn(f"Shrink io_depth from {depth} to {fitting} to fit buffer_size={size}.")
    return min(depth, fitting)


def _budget_022(asked: float | None, place: Place) -> int:
    share = _or(asked, 0.5)
    valid = math.isfinite(share) and 0 < share <= 1
    # A rank with a bad share still joins the exchange, so that none is stranded.
    budget = place.least(int(place.free_memory * share) if valid else 0)
    if not valid:
        raise RuntimeError(
            "Cannot select memory budget: max_free_mem_usage must be finite and "
            "satisfy 0 < value <= 1"
        )
    return budget


def _usable_cpus() -> int:
    counts = [os.cpu_count() or 1, len(os.sched_getaffinity(0))]
    root = Path("/sys/fs/cgroup")
    # An unlimited quota reads "max" (version 2) or -1 (version 1).
    with contextlib.suppress(OSError, ValueError):
        if (root / "cpu.max").exists():
            words = (root / "cpu.max").read_text().split()
        else:
            files = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            words = [(root / "cpu" / file).read_text() for file in files]
        quota, period = map(int, words)
        if quota > 0 and period > 0:
            counts.append(math.ceil(quota / period))
    return max(min(counts), 1)


# The ring.


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


def required_buffer_size_for_io(chunk_size: int, io_depth: int, world_size: int) -> int:
    """Bytes of the ring that `io_depth` reads of every rank need.

    The real function is compiled. Taken from its results: chunks are rounded up to
    pages, and every rank's reads land in every rank's ring.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    return math.ceil(chunk_size / page) * page * io_depth * world_size


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
