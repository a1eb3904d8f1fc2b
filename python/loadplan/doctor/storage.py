"""Can this machine read the checkpoint the way InstantTensor wants to?"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
import resource

from loadplan.doctor.finding import Finding, Need, Verdict
from loadplan.units import gib

# System call numbers; io_uring's is the same everywhere.
_IO_URING_SETUP = 425
_IO_SETUP = {"x86_64": 206, "aarch64": 0}
_IO_DESTROY = {"x86_64": 207, "aarch64": 1}

# What InstantTensor asks for: reads in flight of one process, at most.
_READS = 512
_URING_PARAMETERS_BYTES = 120

_BLOCK = 4096
_LOCKED = 64 << 20


def probe(need: Need) -> list[Finding]:
    """Asynchronous reads, direct reads, locked memory."""
    uring, uring_result = _try_io_uring()
    aio, aio_result = _try_aio()
    async_matters = not need.in_memory
    none = async_matters and not uring and not aio
    return [
        Finding(
            about="io_uring",
            tried=f"io_uring_setup for {_READS} reads",
            result=uring_result,
            verdict=_verdict(uring, fails=none, matters=async_matters),
            means=_means(
                uring,
                need,
                good="files on disk are read by it",
                bad="InstantTensor falls back to AIO"
                if aio
                else "InstantTensor finds no way to read from disk",
            ),
            change=""
            if uring
            else "docker run --security-opt seccomp=unconfined (or a profile that "
            "allows io_uring_setup); sysctl -w kernel.io_uring_disabled=0",
        ),
        Finding(
            about="AIO",
            tried=f"io_setup for {_READS} reads",
            result=aio_result,
            verdict=_verdict(aio, fails=none, matters=async_matters and not uring),
            means=_means(
                aio,
                need,
                good="stands in for io_uring" + ("" if uring else ", and is needed"),
                bad="not needed beside io_uring"
                if uring
                else "InstantTensor finds no way to read from disk",
            ),
            change=""
            if aio
            else "sysctl -w fs.aio-max-nr=1048576; or INSTANTTENSOR_BACKEND=MMAP",
        ),
        _direct_reads(need),
        _locked_memory(),
    ]


def _verdict(works: bool, *, fails: bool, matters: bool) -> Verdict:
    if works or not matters:
        return Verdict.OK
    return Verdict.FAILS if fails else Verdict.SLOW


def _means(works: bool, need: Need, *, good: str, bad: str) -> str:
    if need.in_memory:
        return "not needed: the checkpoint lies in memory"
    return good if works else bad


def _system_call(number: int, *arguments: object) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(ctypes.c_long(number), *arguments)


def _refused() -> str:
    number = ctypes.get_errno()
    return f"refused: {errno.errorcode.get(number, number)}, {os.strerror(number)}"


def _try_io_uring() -> tuple[bool, str]:
    parameters = ctypes.create_string_buffer(_URING_PARAMETERS_BYTES)
    ring = _system_call(_IO_URING_SETUP, ctypes.c_uint(_READS), parameters)
    if ring < 0:
        return False, _refused()
    os.close(ring)
    return True, "works"


def _try_aio() -> tuple[bool, str]:
    machine = platform.machine()
    if machine not in _IO_SETUP:
        return False, f"not known how to try on {machine}"
    context = ctypes.c_ulong(0)
    made = _system_call(
        _IO_SETUP[machine], ctypes.c_uint(_READS), ctypes.byref(context)
    )
    if made < 0:
        return False, _refused()
    _system_call(_IO_DESTROY[machine], context)
    return True, "works"


def _direct_reads(need: Need) -> Finding:
    about, tried = "direct reads", "the first 4 KiB of a shard with O_DIRECT"
    if need.shard is None:
        return Finding(
            about, tried, "no checkpoint was given", Verdict.UNTRIED, "unknown"
        )
    result = _try_direct_read(need.shard)
    if need.in_memory:
        means = "not needed: the checkpoint lies in memory"
        return Finding(about, tried, result or "works", Verdict.OK, means)
    if not result:
        means = "files are read past the page cache"
        return Finding(about, tried, "works", Verdict.OK, means)
    return Finding(
        about,
        tried,
        result,
        Verdict.FAILS,
        "InstantTensor's default backends open files that way",
        "INSTANTTENSOR_BACKEND=BUFFERED, or copy the checkpoint to a local disk",
    )


def _try_direct_read(path: str) -> str:
    """Why it does not work, empty if it does."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        try:
            # Anonymous maps begin on a page, as direct reads need it.
            with mmap.mmap(-1, _BLOCK) as block:
                os.preadv(file, [block], 0)
        finally:
            os.close(file)
    except OSError as error:
        return f"refused: {errno.errorcode.get(error.errno)}, {error.strerror}"
    return ""


def _lock(address: object, nbytes: int) -> int:
    """mlock(2); what is unmapped is unlocked too."""
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.mlock(address, ctypes.c_size_t(nbytes))


def _locked_memory() -> Finding:
    tried = f"mlock of {gib(_LOCKED)}"
    with mmap.mmap(-1, _LOCKED) as memory:
        pinned = ctypes.c_char.from_buffer(memory)
        works = _lock(ctypes.byref(pinned), _LOCKED) == 0
        result = "works" if works else _refused()
        del pinned  # the map cannot be closed while it points there
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY:
        result += f" (the limit is {gib(limit)})"
    return Finding(
        "locked memory",
        tried,
        result,
        Verdict.OK if works else Verdict.SLOW,
        "enough for io_uring and RDMA"
        if works
        else "io_uring before Linux 5.12 and RDMA between hosts may be refused; CUDA's "
        "pinning is tried apart",
        "" if works else "docker run --ulimit memlock=-1; ulimit -l unlimited",
    )
