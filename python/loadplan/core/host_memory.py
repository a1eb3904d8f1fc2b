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

# By version: limit and use of a group, and the counters of its page cache.
_FILES = {
    2: ("memory.max", "memory.current", ("active_file", "inactive_file")),
    1: (
        "memory.limit_in_bytes",
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
    limit_file, use_file, reclaimable = _FILES[version]
    try:
        limit = (level / limit_file).read_text().strip()
        use = int((level / use_file).read_text())
        stat = (level / "memory.stat").read_text().splitlines()
    except OSError:
        return None  # the root of version 2 has no limit
    if limit == "max":
        return None
    counts = dict(line.split(maxsplit=1) for line in stat)
    cached = sum(int(counts.get(name, 0)) for name in reclaimable)
    return max(int(limit) - use + cached, 0)
