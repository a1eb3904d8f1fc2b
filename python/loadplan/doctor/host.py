"""Is there host memory for the tables, of the kind that makes lookups fast?"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import uuid
from pathlib import Path

from loadplan.core.host_memory import available_memory
from loadplan.doctor.finding import Finding, Need, Verdict
from loadplan.units import gib

_SHM = Path("/dev/shm")
_SHM_BYTES = 256 << 20

# A huge page of the usual 2 MiB fits whole into this, wherever it begins.
_HUGE_BYTES = 8 << 20
_SETTINGS = "/sys/kernel/mm/transparent_hugepage"


def probe(need: Need) -> list[Finding]:
    """Free memory within the limits, /dev/shm, huge pages of both kinds."""
    return [
        _free_memory(need),
        _shared_folder(need),
        _huge_pages(need, shared=False),
        _huge_pages(need, shared=True),
    ]


def _free_memory(need: Need) -> Finding:
    about, tried = "host memory", "MemAvailable and the limits of all control groups"
    free = available_memory()
    result = f"{gib(free)} can be had"
    if need.host_bytes is None:
        return Finding(
            about, tried, result, Verdict.OK, "no checkpoint to compare with"
        )
    if need.host_bytes <= free:
        means = f"the load needs {gib(need.host_bytes)} on this host"
        return Finding(about, tried, result, Verdict.OK, means)
    return Finding(
        about,
        tried,
        result,
        Verdict.FAILS,
        f"the load needs {gib(need.host_bytes)} on this host and would be killed",
        "docker run --memory with more, end what else runs, more hosts, or "
        '--engram-config \'{"placement": "gpu"}\'; some virtual machines show memory '
        "only when it is used",
    )


def _shared_folder(need: Need) -> Finding:
    tried = f"a file of {gib(_SHM_BYTES)} in {_SHM}"
    result = _try_shared_file()
    if not result:
        means = "room for the queues between processes and for NCCL"
        return Finding("/dev/shm", tried, "works", Verdict.OK, means)
    # One process alone exchanges nothing.
    several = need.ranks > 1
    return Finding(
        "/dev/shm",
        tried,
        result,
        Verdict.FAILS if several else Verdict.SLOW,
        f"NCCL and the queues of {need.ranks} ranks need it"
        if several
        else "several ranks would not start",
        "docker run --shm-size=16g, or --ipc=host",
    )


def _try_shared_file() -> str:
    """Why memory cannot be had there, empty if it can."""
    path = _SHM / f"loadplan-doctor-{uuid.uuid4().hex}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.unlink(path)
            os.posix_fallocate(file, 0, _SHM_BYTES)
        finally:
            os.close(file)
    except OSError as error:
        return f"refused: {error.strerror}"
    return ""


def _huge_pages(need: Need, *, shared: bool) -> Finding:
    kind = "shared" if shared else "anonymous"
    about = f"huge pages, {kind}"
    tried = f"madvise of {gib(_HUGE_BYTES)} of {kind} memory, then touched"
    result = _try_huge_pages(shared=shared)
    layout = "shared" if shared else "per_rank"
    if need.layout != layout:
        means = "not needed: no table lies there"
        return Finding(about, tried, result or "works", Verdict.OK, means)
    if not result:
        means = f"tables of the layout {layout} get huge pages"
        return Finding(about, tried, "works", Verdict.OK, means)
    file, value = ("shmem_enabled", "advise") if shared else ("enabled", "madvise")
    return Finding(
        about,
        tried,
        result,
        Verdict.SLOW,
        "lookups in the tables miss the TLB at every row",
        f"on the host: echo {value} > {_SETTINGS}/{file}",
    )


def _try_huge_pages(*, shared: bool) -> str:
    """Why memory is not in huge pages, empty if it is."""
    memory = _map(shared=shared)
    with memory:
        try:
            memory.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            return f"refused: {error.strerror}"
        for offset in range(0, _HUGE_BYTES, mmap.PAGESIZE):
            memory[offset] = 1
        pointer = ctypes.c_char.from_buffer(memory)
        address = ctypes.addressof(pointer)
        del pointer  # the map cannot be closed while it points there
        huge = _huge_bytes(address, shared=shared)
    return "" if huge else "taken, but no huge page was given"


def _map(*, shared: bool) -> mmap.mmap:
    if not shared:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return mmap.mmap(-1, _HUGE_BYTES, flags=flags)
    file = os.memfd_create("loadplan-doctor")
    try:
        os.ftruncate(file, _HUGE_BYTES)
        return mmap.mmap(file, _HUGE_BYTES, flags=mmap.MAP_SHARED)
    finally:
        os.close(file)


def _huge_bytes(address: int, *, shared: bool) -> int:
    """How much of the mapping at ``address`` is in huge pages: the kernel's count."""
    field = "ShmemPmdMapped" if shared else "AnonHugePages"
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        mapped = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if mapped is not None:
            inside = int(mapped[1], 16) <= address < int(mapped[2], 16)
        elif inside and line.startswith(f"{field}:"):
            return int(line.split()[1]) << 10
    return 0
