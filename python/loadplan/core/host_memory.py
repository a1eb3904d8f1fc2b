"""How much host memory this process can really get: the machine's, within its limits.

A container's limit does not show in /proc/meminfo. Page cache counts as free: the
kernel gives it up before it refuses or kills.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_MEMBERSHIP = Path("/proc/self/cgroup")
_CGROUPS = Path("/sys/fs/cgroup")

# By version: limits and use of a group, and the counters of its page cache. At "high"
# the kernel does not kill; it slows every allocation down until a load stands still.
_FILES = {
    2: (
        ("memory.max", "memory.high"),
        "memory.current",
        ("active_file", "inactive_file"),
    ),
    1: (
        ("memory.limit_in_bytes",),
        "memory.usage_in_bytes",
        ("total_active_file", "total_inactive_file"),
    ),
}


def available_memory() -> int:
    """Bytes that can still be allocated and kept, swap apart.

    The least of what the machine has available and what each control group above this
    process has left.

    Raises:
        OSError: /proc is not mounted.
    """
    return min([_machine(), *_control_groups()])


def _machine() -> int:
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise OSError(f"{_MEMINFO}: no MemAvailable, expected a kernel since 3.14")


def _control_groups() -> Iterator[int]:
    try:
        lines = _MEMBERSHIP.read_text().splitlines()
    except OSError:
        return  # a kernel without control groups
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            yield from _levels(_CGROUPS, path, version=2)
        elif "memory" in controllers.split(","):
            yield from _levels(_CGROUPS / "memory", path, version=1)


def _levels(root: Path, path: str, *, version: int) -> Iterator[int]:
    """What each level has left, from the process's own group up to the root."""
    folder = root / path.lstrip("/")
    # A container may see its group as the root, under the path that its host knows.
    if not folder.is_dir():
        folder = root
    for level in (folder, *folder.parents):
        left = _left(level, version=version)
        if left is not None:
            yield left
        if level == root:
            return


def _left(level: Path, *, version: int) -> int | None:
    limit_files, use_file, reclaimable = _FILES[version]
    limits = [_number(_text(level / name)) for name in limit_files]
    limit = min((limit for limit in limits if limit is not None), default=None)
    if limit is None:
        return None  # the root of version 2 has none
    # What cannot be read must not lift the limit: without the use there is at most all
    # of it left, without the counters no page cache is given back.
    use = _number(_text(level / use_file)) or 0
    counts = dict(
        words
        for line in _text(level / "memory.stat").splitlines()
        if len(words := line.split()) == 2
    )
    cached = sum(_number(counts.get(name, "")) or 0 for name in reclaimable)
    return max(limit - max(use - cached, 0), 0)


def _text(path: Path) -> str:
    """What is in a file of the kernel's, empty where it cannot be read."""
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _number(text: str) -> int | None:
    """A count of bytes; None for ``max``, for nothing and for what is no number."""
    text = text.strip()
    return int(text) if text.isdecimal() else None
