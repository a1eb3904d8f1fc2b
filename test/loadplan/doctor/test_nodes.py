"""NUMA nodes that are too small for what is bound to them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadplan.doctor import Need, Verdict, nodes

GIB = 1 << 30
MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two nodes with 8 and 2 GiB to be had, 4 GiB of the second in a pool."""
    for number, free, cached, pages in ((0, 6, 2, 0), (1, 1, 1, 4096)):
        node = tmp_path / f"node{number}"
        pool = node / "hugepages" / "hugepages-1024kB"
        pool.mkdir(parents=True)
        (pool / "nr_hugepages").write_text(f"{pages}\n")
        (node / "meminfo").write_text(
            f"Node {number} MemTotal: {9 << 20} kB\n"
            f"Node {number} MemFree: {free << 20} kB\n"
            f"Node {number} Active(file): {cached << 20} kB\n"
            f"Node {number} Inactive(file): 0 kB\n"
        )
    (tmp_path / "node2").mkdir()
    (tmp_path / "node2" / "meminfo").write_text("Node 2 MemTotal: 0 kB\n")
    monkeypatch.setattr(nodes, "_NODES", tmp_path)
    monkeypatch.setattr(nodes, "_STATUS", tmp_path / "status")
    monkeypatch.setattr(nodes, "_policy", lambda: None)
    (tmp_path / "status").write_text("Name: x\nMems_allowed_list:\t0-1\n")
    return tmp_path


def look(gib: int | None, *, layout: str | None = "per_rank", ranks: int = 1):
    need = Need(host_bytes=gib and gib * GIB, layout=layout, ranks=ranks)
    (found,) = nodes.probe(need)
    return found


def test_nodes_are_told_with_their_pools(machine: Path) -> None:
    """Red when page cache counts as used, or a node without memory is one."""
    assert nodes.read_nodes() == [
        nodes.Node(0, 8 * GIB, 0),
        nodes.Node(1, 2 * GIB, 4 * GIB),
    ]
    assert "node 1: 2.00 GiB can be had, 4.00 GiB are in its pool" in look(1).result


@pytest.mark.parametrize(
    ("gib", "layout", "ranks", "verdict"),
    [
        (None, "per_rank", 1, Verdict.OK),
        (9, None, 1, Verdict.OK),
        (2, "per_rank", 1, Verdict.OK),
        (3, "per_rank", 1, Verdict.SLOW),
        (4, "per_rank", 2, Verdict.OK),
        (4, "shared", 2, Verdict.SLOW),
    ],
)
def test_node_that_is_too_small_is_named(
    machine: Path, gib: int | None, layout: str | None, ranks: int, verdict: Verdict
) -> None:
    """A rank's part, or a whole shared table; red when the wrong one is compared."""
    found = look(gib, layout=layout, ranks=ranks)
    assert found.verdict is verdict
    if verdict is Verdict.SLOW:
        assert "bound to node 1 does not fit" in found.means
        assert "pool of huge pages on node 1 smaller" in found.change


@pytest.mark.parametrize(
    ("allowed", "policy", "gib", "verdict"),
    [
        ("1", None, 2, Verdict.OK),
        ("1", None, 3, Verdict.FAILS),
        ("0-1", {1}, 3, Verdict.FAILS),
        ("0-1", {0}, 8, Verdict.OK),
        ("0,1", {0}, 9, Verdict.FAILS),
    ],
)
def test_bound_process_has_its_nodes_alone(
    machine: Path, monkeypatch, allowed: str, policy, gib: int, verdict: Verdict
) -> None:
    """By a cpuset or by numactl; red when the machine's memory is counted."""
    (machine / "status").write_text(f"Mems_allowed_list:\t{allowed}\n")
    monkeypatch.setattr(nodes, "_policy", lambda: policy)
    found = look(gib, ranks=2)
    assert found.verdict is verdict
    if verdict is Verdict.FAILS:
        assert "alone" in found.means and "--membind" in found.change


def test_kernel_that_tells_no_nodes(machine: Path, monkeypatch) -> None:
    """Red when doctor dies there, or calls it a failure."""
    monkeypatch.setattr(nodes, "_NODES", machine / "none")
    assert look(9).verdict is Verdict.UNTRIED


def test_policy_of_this_process() -> None:
    """Bound by the system call itself; red when its numbers or its mask are wrong."""
    code = (
        "import ctypes, platform; from loadplan.doctor import nodes\n"
        "print(nodes._policy())\n"
        "number = {'x86_64': 238, 'aarch64': 237}[platform.machine()]\n"
        "mask = (ctypes.c_ulong * 16)(1)\n"
        "libc = ctypes.CDLL(None)\n"
        "print(libc.syscall(ctypes.c_long(number), 2, mask, ctypes.c_ulong(1024)))\n"
        "print(nodes._policy())\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "python")},
    )
    before, refused, after = result.stdout.split("\n")[:3]
    assert result.returncode == 0, result.stderr
    if refused != "0":
        pytest.skip("a sandbox refuses set_mempolicy(2)")
    assert (before, after) == ("None", "{0}")
