"""How InstantTensor chooses its reads, for the stub: chunk, threads and depth.

Sizes are in bytes, depths in reads of one rank, texts those that users of the library
see. `_019` and `_022` are the rules of the releases 0.1.9 and 0.2.2.
"""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadplan.standin.backends import (
    DIRECT,
    THREADED,
    Backend,
    Place,
    choose_backend_019,
    choose_backend_022,
)
from loadplan.standin.caller import warn
from loadplan.standin.settings import Settings

_MIB = 1 << 20
_MAX_IO_DEPTH = 1024
_MAX_CHUNK_SIZE = 1024 * _MIB


@dataclass(frozen=True, slots=True)
class Reads:
    """How the files are read; `budget` is the most that the ring may take."""

    backend: Backend
    chunk_size: int
    concurrency: int
    io_depth: int
    budget: int


def choose_reads_019(asked: Settings, place: Place) -> Reads:
    """Choose the reads; depth gives way to the budget first, then threads."""
    ranks = place.world_size
    backend = choose_backend_019(asked.backend, place)
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
    backend = choose_backend_022(asked.backend, place)
    asked_threads = _threads_022(asked.concurrency, backend)
    workers = max(min(32, _usable_cpus()) // ranks - 4, 1)
    chunk, threads = 8 * _MIB, 0
    if backend is Backend.MMAP:
        chunk, threads = 2 * _MIB, _or(asked_threads, workers)
        depth = 3 * threads
    elif backend is Backend.CUFILE:
        threads = _or(asked_threads, max(32 // ranks, 1))
        depth = 2 * threads
    elif backend in DIRECT:
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
    if backend not in THREADED:
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


def required_buffer_size_for_io(chunk_size: int, io_depth: int, world_size: int) -> int:
    """Bytes of the ring that `io_depth` reads of every rank need.

    The real function is compiled. Taken from its results: chunks are rounded up to
    pages, and every rank's reads land in every rank's ring.
    """
    page = os.sysconf("SC_PAGE_SIZE")
    return math.ceil(chunk_size / page) * page * io_depth * world_size


def _or(chosen: Any, default: Any) -> Any:
    return default if chosen is None else chosen
