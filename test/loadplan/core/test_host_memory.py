"""Host memory that can be had: the machine's, within its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadplan.core import host_memory

MIB = 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 1,000 MiB without limits."""
    (tmp_path / "meminfo").write_text(
        f"MemTotal: 9999999 kB\nMemFree: 7 kB\nMemAvailable:   {1000 << 10} kB\n"
    )
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_MEMBERSHIP", tmp_path / "cgroup")
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path / "fs")
    return tmp_path


def group(
    folder: Path, *, limit: int | None, used: int, cached: int = 0, version: int = 2
) -> None:
    """A control group, in MiB; ``cached`` is in two halves, as the kernel counts it."""
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    (folder / names[0]).write_text("max\n" if limit is None else f"{limit * MIB}\n")
    (folder / names[1]).write_text(f"{used * MIB}\n")
    half = cached * MIB // 2
    (folder / "memory.stat").write_text(
        f"anon 5\n{names[2]}active_file {half}\n{names[2]}inactive_file {half}\n"
    )


def test_machine_without_control_groups(machine: Path) -> None:
    """Red when MemFree or MemTotal is taken for what is available."""
    assert host_memory.available_memory() == 1000 * MIB


@pytest.mark.parametrize(
    ("limit", "used", "cached", "left"),
    [(512, 100, 0, 412), (512, 500, 400, 412), (None, 100, 0, 1000), (512, 600, 0, 0)],
)
def test_limit_of_the_own_group(machine: Path, limit, used, cached, left) -> None:
    """Page cache is given back; red when it counts as used, or less than none is."""
    (machine / "cgroup").write_text("0::/docker/abc\n")
    group(machine / "fs/docker/abc", limit=limit, used=used, cached=cached)
    assert host_memory.available_memory() == left * MIB


def test_every_level_limits(machine: Path) -> None:
    """Red when a pod's limit above the container's is missed."""
    (machine / "cgroup").write_text("0::/pod/box\n")
    group(machine / "fs/pod/box", limit=900, used=100)
    group(machine / "fs/pod", limit=400, used=150)
    assert host_memory.available_memory() == 250 * MIB


def test_container_that_sees_its_group_as_the_root(machine: Path) -> None:
    """Red when a path of the host hides the limit."""
    (machine / "cgroup").write_text("0::/docker/of/the/host\n")
    group(machine / "fs", limit=300, used=100)
    assert host_memory.available_memory() == 200 * MIB


def test_version_1_beside_version_2(machine: Path) -> None:
    """Red when the memory controller of a hybrid machine is not found."""
    (machine / "cgroup").write_text("4:cpu,memory:/box\n2:pids:/\n0::/\n")
    (machine / "fs").mkdir()
    group(machine / "fs/memory/box", limit=600, used=300, cached=100, version=1)
    assert host_memory.available_memory() == 400 * MIB


@pytest.mark.parametrize(
    ("highest", "high", "left"),
    [(None, 512, 412), (800, 512, 412), (400, 512, 300), (None, None, 1000)],
)
def test_high_mark_limits_like_the_limit(machine: Path, highest, high, left) -> None:
    """Above it the kernel slows the group to a halt; red when only the limit counts."""
    (machine / "cgroup").write_text("0::/box\n")
    group(machine / "fs/box", limit=highest, used=100)
    text = "max\n" if high is None else f"{high * MIB}\n"
    (machine / "fs/box/memory.high").write_text(text)
    assert host_memory.available_memory() == left * MIB


@pytest.mark.parametrize(
    ("name", "content", "left"),
    [
        ("memory.stat", None, 312),
        ("memory.stat", "active_file\n\ninactive_file many\n", 312),
        ("memory.current", None, 512),
        ("memory.current", "\n", 512),
        ("memory.high", "nonsense\n", 412),
    ],
)
def test_what_cannot_be_read_does_not_lift_the_limit(
    machine: Path, name: str, content: str | None, left: int
) -> None:
    """Red when an unreadable counter makes the whole machine available."""
    (machine / "cgroup").write_text("0::/box\n")
    group(machine / "fs/box", limit=512, used=200, cached=100)
    if content is None:
        (machine / "fs/box" / name).unlink()
        (machine / "fs/box" / name).mkdir()
    else:
        (machine / "fs/box" / name).write_text(content)
    assert host_memory.available_memory() == left * MIB


def test_more_cache_than_use_is_no_more_than_the_limit(machine: Path) -> None:
    """The two are read one after the other; red when they sum up past the limit."""
    (machine / "cgroup").write_text("0::/box\n")
    group(machine / "fs/box", limit=512, used=100, cached=200)
    assert host_memory.available_memory() == 512 * MIB


def test_this_machine_has_some() -> None:
    """Red when the real files are read otherwise than these."""
    assert MIB < host_memory.available_memory() < 1 << 50
