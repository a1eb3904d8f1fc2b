"""Is there room on each NUMA node for the tables of a rank that is bound to it?

A bound process (numactl --membind, a cpuset) gets memory of its nodes alone and is
killed where they are full, whatever the machine has left. Pages of the pool of huge
pages (hugetlb) are nobody else's: what is reserved there, tables cannot use.
"""

from __future__ import annotations

import ctypes
import dataclasses
import platform
import re
from pathlib import Path

from loadplan.doctor.finding import Finding, Need, Verdict
from loadplan.units import gib

_NODES = Path("/sys/devices/system/node")
_STATUS = Path("/proc/self/status")

# get_mempolicy(2) and the mode MPOL_BIND, of linux/mempolicy.h.
_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_BIND = 2
_MOST_NODES = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class Node:
    """A node's memory in bytes: what can be had, what its pools of huge pages hold."""

    number: int
    available: int
    pooled: int


def probe(need: Need) -> list[Finding]:
    """The memory of each node, and what this process may use of it."""
    about = "NUMA nodes"
    tried = "the memory of each node, and whether this process is bound"
    nodes = read_nodes()
    if not nodes:
        return [
            Finding(about, tried, "the kernel tells none", Verdict.UNTRIED, "unknown")
        ]
    bound = bound_nodes() & {node.number for node in nodes}
    is_bound = 0 < len(bound) < len(nodes)
    result = "; ".join(map(_told, nodes))
    if is_bound:
        result += f"; bound to {_list(bound)}"
    if need.host_bytes is None or need.layout is None:
        means = "no table in host memory to compare with"
        return [Finding(about, tried, result, Verdict.OK, means)]
    if is_bound:
        return [_bound(about, tried, result, need, nodes, bound)]
    share = need.host_bytes
    if need.layout == "per_rank":
        share = -(-need.host_bytes // need.ranks)
    small = [node for node in nodes if node.available < share]
    if len(nodes) == 1 or not small:
        means = f"each has room for what one binds to it, {gib(share)}"
        if len(nodes) == 1:
            means = "one node: nothing can be bound elsewhere"
        return [Finding(about, tried, result, Verdict.OK, means)]
    return [
        Finding(
            about,
            tried,
            result,
            Verdict.SLOW,
            f"a table of {gib(share)} that is bound to {_names(small)} does not fit "
            "there; unbound it spills to other nodes",
            f"{_free_pools(small)}bind to other nodes, or numactl --interleave=all",
        )
    ]


def _bound(
    about: str,
    tried: str,
    result: str,
    need: Need,
    nodes: list[Node],
    bound: set[int],
) -> Finding:
    mine = [node for node in nodes if node.number in bound]
    have = sum(node.available for node in mine)
    if need.host_bytes <= have:
        means = f"the load needs {gib(need.host_bytes)} of {gib(have)} there"
        return Finding(about, tried, result, Verdict.OK, means)
    return Finding(
        about,
        tried,
        result,
        Verdict.FAILS,
        f"the load needs {gib(need.host_bytes)} on this host and may use "
        f"{_names(mine)} alone, with {gib(have)}: it would be killed",
        f"{_free_pools(mine)}start it without numactl --membind, or with more nodes "
        "(docker run --cpuset-mems)",
    )


def read_nodes() -> list[Node]:
    """Every node that has memory, by number; empty where the kernel tells none."""
    found = []
    for folder in _NODES.glob("node[0-9]*"):
        number = int(folder.name.removeprefix("node"))
        try:
            text = (folder / "meminfo").read_text()
        except OSError:
            continue
        sizes = {
            name: int(value) << 10
            for name, value in re.findall(r"(\S+):\s+([0-9]+) kB", text)
        }
        if not sizes.get("MemTotal"):
            continue
        # Page cache is given back before anybody is refused.
        names = ("MemFree", "Active(file)", "Inactive(file)")
        available = sum(sizes.get(name, 0) for name in names)
        found.append(Node(number, available, _pooled(folder)))
    return sorted(found, key=lambda node: node.number)


def _pooled(folder: Path) -> int:
    total = 0
    for pool in folder.glob("hugepages/hugepages-*kB"):
        try:
            pages = int((pool / "nr_hugepages").read_text())
        except (OSError, ValueError):
            continue
        size = int(pool.name.removeprefix("hugepages-").removesuffix("kB"))
        total += pages * (size << 10)
    return total


def bound_nodes() -> set[int]:
    """The nodes whose memory this process may use: its cpuset's, within its policy."""
    try:
        allowed = re.search(r"^Mems_allowed_list:\s*(\S+)", _STATUS.read_text(), re.M)
    except OSError:
        allowed = None
    nodes = set(range(_MOST_NODES)) if allowed is None else _parse(allowed[1])
    policy = _policy()
    return nodes if policy is None else nodes & policy


def _parse(text: str) -> set[int]:
    """The numbers of a list like ``0-2,5``."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def _policy() -> set[int] | None:
    """The nodes that a policy of memory binds to, None where none does."""
    number = _GET_MEMPOLICY.get(platform.machine())
    if number is None:
        return None
    mode = ctypes.c_int(-1)
    mask = (ctypes.c_ulong * (_MOST_NODES // 64))()
    libc = ctypes.CDLL(None, use_errno=True)
    failed = libc.syscall(
        ctypes.c_long(number),
        ctypes.byref(mode),
        mask,
        ctypes.c_ulong(_MOST_NODES),
        None,
        ctypes.c_ulong(0),
    )
    if failed or mode.value & 0xFF != _BIND:
        return None
    return {n for n in range(_MOST_NODES) if mask[n // 64] >> n % 64 & 1}


def _told(node: Node) -> str:
    text = f"node {node.number}: {gib(node.available)} can be had"
    if node.pooled:
        text += f", {gib(node.pooled)} are in its pool of huge pages"
    return text


def _names(nodes: list[Node]) -> str:
    return _list({node.number for node in nodes})


def _list(numbers: set[int]) -> str:
    s = "" if len(numbers) == 1 else "s"
    return f"node{s} {', '.join(map(str, sorted(numbers)))}"


def _free_pools(nodes: list[Node]) -> str:
    pooled = [node for node in nodes if node.pooled]
    if not pooled:
        return ""
    return f"make the pool of huge pages on {_names(pooled)} smaller, "
