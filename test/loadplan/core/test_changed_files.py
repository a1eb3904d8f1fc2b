"""Files that are replaced, cut short or copied between the plan and the last read."""

from __future__ import annotations

import copy
import os
import pickle
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from files import write_shard
from safetensors import safe_open

from loadplan.core import read
from loadplan.core.header import LoadPlanError, ShortFileError, read_header
from loadplan.core.loading import decide_routes, run_load
from loadplan.core.plan import LoadPlan
from loadplan.core.stream import run_plan

CPU = torch.device("cpu")
FIRST = [("x", "U8", (64, 4)), ("y", "U8", (8, 4))]
# The same size in all, other shapes and bytes.
SECOND = [("x", "U8", (61, 4)), ("y", "U8", (11, 4))]


def streamed(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def plan(path: Path, route: str) -> LoadPlan:
    options = {"host": {"host_resident_weight_patterns": ("x", "y")}, "read": {}}
    reader = "read" if route == "read" else "instanttensor"
    return decide_routes(
        [read_header(str(path))], reader=reader, **options.get(route, {})
    )


def load(made: LoadPlan, run=run_load) -> list[tuple[str, torch.Tensor]]:
    return list(run(made, stream_files=streamed, device=CPU))


@pytest.mark.parametrize("run", [run_load, run_plan])
@pytest.mark.parametrize("route", ["host", "read", "stream"])
def test_replaced_file_is_told_before_a_byte_of_it_arrives(
    tmp_path: Path, route: str, run
) -> None:
    """One of the same size with another header; red when its bytes pass for ours."""
    path = write_shard(tmp_path / "a.safetensors", FIRST)
    made = plan(path, route)
    other = write_shard(tmp_path / "b.safetensors", SECOND, salt=3)
    os.truncate(other, path.stat().st_size)
    os.replace(other, path)
    with pytest.raises(LoadPlanError, match="a.safetensors: changed while loading"):
        load(made, run)


def test_file_that_is_written_to_is_told(tmp_path: Path) -> None:
    """In place, so that inode and size stay; red when only those are compared."""
    path = write_shard(tmp_path / "a.safetensors", FIRST)
    made = plan(path, "read")
    with open(path, "r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"abcd")
    os.utime(path, ns=(1, 1))
    with pytest.raises(LoadPlanError, match="changed while loading"):
        load(made)


@pytest.mark.parametrize("run", [run_load, run_plan])
@pytest.mark.parametrize("route", ["host", "read", "stream"])
@pytest.mark.parametrize("left", [0, 100])
def test_file_that_was_cut_is_a_short_file(
    tmp_path: Path, route: str, left: int, run
) -> None:
    """Red when it is a bare error of mmap, or one without the path."""
    path = write_shard(tmp_path / "a.safetensors", FIRST)
    made = plan(path, route)
    os.truncate(path, left)
    with pytest.raises(ShortFileError, match=f"a.safetensors: ends at byte {left}"):
        load(made, run)


def test_copies_of_a_host_tensor_own_no_second_descriptor(tmp_path: Path) -> None:
    """Red when a copy's end closes what the original, or somebody else, reads from."""
    path = write_shard(tmp_path / "a.safetensors", FIRST)
    found = dict(load(plan(path, "host")))
    original = found["x"]
    expected = original.clone()
    before = len(os.listdir("/proc/self/fd"))
    for made in (copy.deepcopy(original.row_source), copy.copy(original.row_source)):
        del made
    twice = copy.deepcopy(original)
    del twice
    assert len(os.listdir("/proc/self/fd")) == before
    with open(path, "rb"):  # It would get the number of a descriptor that was closed.
        rows = torch.empty(3, 4, dtype=torch.uint8)
        original.row_source.read_rows_into(rows, 5)
    assert torch.equal(rows, expected[5:8])
    again = pickle.loads(pickle.dumps(original.row_source))
    again.read_rows_into(rows, 7)
    assert torch.equal(rows, expected[7:10])


def test_more_files_than_this_process_may_open_are_told(tmp_path: Path) -> None:
    """Red when EMFILE comes without a file and a way out."""
    paths = [
        write_shard(tmp_path / f"{i}.safetensors", [(f"t{i}", "U8", (4,))])
        for i in range(40)
    ]
    made = decide_routes(
        [read_header(str(path)) for path in paths],
        host_resident_weight_patterns=("t",),
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = len(os.listdir("/proc/self/fd"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 20, hard))
    try:
        with pytest.raises(LoadPlanError, match=r"safetensors: .*'ulimit -n'"):
            load(made)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_file_of_another_machine_is_read_not_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a page of it may be gone when a weight loader touches it (SIGBUS)."""
    path = write_shard(tmp_path / "a.safetensors", FIRST)
    monkeypatch.setattr(read, "file_system", lambda place: 0x6969)
    monkeypatch.setattr(read.OpenFile, "map", lambda self: pytest.fail("mapped"))
    found = dict(load(plan(path, "host")))
    assert torch.equal(found["x"], dict(streamed([str(path)]))["x"])
    os.truncate(path, 0)
    assert found["y"].sum() >= 0
    monkeypatch.setattr(read, "_MOST_COPIED_BYTES", 8)
    with pytest.raises(pytest.fail.Exception, match="mapped"):
        path = write_shard(tmp_path / "b.safetensors", FIRST)
        load(plan(path, "host"))
