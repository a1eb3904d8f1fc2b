"""Running a plan: every wanted tensor once, right bytes, complete or loud."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
from files import write_shard
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from loadplan.core.header import LoadPlanError, read_header
from loadplan.core.loading import decide_routes, run_load
from loadplan.core.plan import LoadPlan, Route
from loadplan.core.read import OpenFile, SafetensorsRowSource, ShortFileError, bytes_of
from loadplan.core.stream import flag
from loadplan.standin.mapped import mapped_bytes

CPU = torch.device("cpu")

ODD = [
    ("byte", "I8", (1,)),
    ("scalar", "F32", ()),
    ("empty", "U8", (0, 4)),
    ("packed", "F4", (2, 8)),
    ("scale", "F8_E8M0", (3,)),
    ("matrix", "BF16", (3, 5)),
]


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


def official(*paths: Path) -> dict[str, tuple]:
    found = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            found |= {name: raw(file.get_tensor(name)) for name in file.keys()}
    return found


def stream_officially(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """What stands in for InstantTensor: whole files, every tensor."""
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                yield name, file.get_tensor(name)


def run(
    plan: LoadPlan, stream=stream_officially, **options: object
) -> Iterator[tuple[str, torch.Tensor]]:
    return run_load(plan, stream_files=stream, device=CPU, **options)


@pytest.fixture
def shards(tmp_path: Path) -> tuple[Path, Path]:
    clean = write_shard(tmp_path / "clean.safetensors", [("whole", "U8", (8,))])
    odd = write_shard(tmp_path / "odd.safetensors", ODD, salt=5)
    return clean, odd


def plan_of(*paths: Path, **kwargs: object) -> LoadPlan:
    return decide_routes([read_header(str(path)) for path in paths], **kwargs)


@pytest.mark.parametrize(
    "pattern", [None, "scalar", "packed", "matrix", "empty", "whole"]
)
def test_every_route_yields_official_bytes_once(
    shards: tuple[Path, Path], pattern: str | None
) -> None:
    """READ and HOST against official safetensors; red when either changes a byte."""
    plan = plan_of(*shards, host_resident_weight_patterns=(pattern,) if pattern else ())
    pairs = list(run(plan))
    assert len(pairs) == len(ODD) + 1
    assert {name: raw(tensor) for name, tensor in pairs} == official(*shards)


def test_host_tensors_come_last_and_carry_their_row_source(
    shards: tuple[Path, Path],
) -> None:
    """Red when HOST is read between device tensors or loses its row source."""
    plan = plan_of(*shards, host_resident_weight_patterns=("matrix", "whole"))
    pairs = list(run(plan))
    assert {name for name, _ in pairs[-2:]} == {"matrix", "whole"}
    carrying = {n for n, tensor in pairs if hasattr(tensor, "row_source")}
    assert carrying == {"matrix", "whole"}


def test_copied_host_tensors_map_no_file_and_others_touch_no_page(
    tmp_path: Path,
) -> None:
    """Every dtype and rank; red when using a copy, or rows, brings mapped pages in."""
    tensors = [*ODD, ("rows", "F8_E8M0", (5, 4096))]
    path = write_shard(tmp_path / "a.safetensors", tensors)
    expected = official(path)
    plan = plan_of(path, host_resident_weight_patterns=(re.compile(""),))
    copied = dict(run(plan, copied=lambda name: True))
    assert {name: raw(tensor) for name, tensor in copied.items()} == expected
    assert mapped_bytes(tmp_path) == {}
    pairs = dict(run(plan, copied=lambda name: name != "rows"))
    assert {n: raw(t) for n, t in pairs.items() if n != "rows"} == {
        name: found for name, found in expected.items() if name != "rows"
    }
    rows = torch.empty(5, 4096, dtype=torch.float8_e8m0fnu)
    pairs["rows"].row_source.read_rows_into(rows, 0)
    assert raw(rows) == expected["rows"]
    assert mapped_bytes(tmp_path) == {"a.safetensors": 0}
    assert raw(pairs["rows"]) == expected["rows"]
    assert mapped_bytes(tmp_path)["a.safetensors"] > 0


def test_copied_host_tensor_is_the_consumers_to_write(
    shards: tuple[Path, Path],
) -> None:
    """Red when two loads share a copy, or a copy lacks its row source."""
    plan = plan_of(*shards, host_resident_weight_patterns=("matrix",))
    first = dict(run(plan, copied=lambda name: True))["matrix"]
    first.zero_()
    again = dict(run(plan, copied=lambda name: True))["matrix"]
    assert raw(again) == official(*shards)["matrix"]
    again.row_source.read_rows_into(first, 0)
    assert raw(first) == raw(again)


def test_row_source_outlives_the_stream_and_reads_just_its_rows(
    shards: tuple[Path, Path],
) -> None:
    """Weight loaders run in threads after the loop; red when the file is closed."""
    plan = plan_of(*shards, host_resident_weight_patterns=("matrix",))
    (matrix,) = [tensor for name, tensor in run(plan) if name == "matrix"]
    expected = raw(matrix[1:3])
    source = matrix.row_source
    del matrix
    rows = torch.zeros(2, 5, dtype=torch.bfloat16)
    source.read_rows_into(rows, 1)
    assert raw(rows) == expected


def test_row_source_refuses_a_destination_that_does_not_fit(
    shards: tuple[Path, Path],
) -> None:
    """Red when rows land in memory of another dtype, layout or length."""
    plan = plan_of(*shards, host_resident_weight_patterns=("matrix",))
    source = dict(run(plan))["matrix"].row_source
    bf16 = torch.bfloat16
    for dst, start in (
        (torch.zeros(1, 5), 0),
        (torch.zeros(1, 4, dtype=bf16), 0),
        (torch.zeros(5, dtype=bf16), 0),
        (torch.zeros(5, 3, dtype=bf16).t(), 0),
        (torch.zeros(4, 5, dtype=bf16), 0),
        (torch.zeros(1, 5, dtype=bf16), 3),
        (torch.zeros(1, 5, dtype=bf16), -1),
        (torch.zeros(1, 5, dtype=bf16, device="meta"), 0),
    ):
        with pytest.raises(LoadPlanError, match="matrix"):
            source.read_rows_into(dst, start)


def test_short_file_is_an_error_with_file_and_offset(
    shards: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when calls return 7 bytes; red when a short read ends a loop early."""
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:7]], at)
    )
    plan = plan_of(*shards)
    assert {n: raw(t) for n, t in run(plan)} == official(*shards)
    size = shards[1].stat().st_size
    os.truncate(shards[1], size - 3)
    with pytest.raises(
        ShortFileError, match=f"odd.safetensors: ends at byte {size - 3}"
    ):
        list(run(plan))
    assert issubclass(ShortFileError, LoadPlanError) and issubclass(
        ShortFileError, EOFError
    )


def test_file_is_closed_with_its_last_reader(shards: tuple[Path, Path]) -> None:
    """Red when descriptors are left open by a load that has ended."""
    plan = plan_of(*shards, host_resident_weight_patterns=("matrix", "scale"))
    weights = run(plan)
    kept = [tensor for _, tensor in weights if hasattr(tensor, "row_source")]

    def still_open() -> list[str]:
        links = [os.path.realpath(f.path) for f in os.scandir("/proc/self/fd")]
        return [link for link in links if link in map(str, shards)]

    assert still_open()
    del kept, weights
    assert still_open() == []


@pytest.mark.parametrize("what", ["lost", "twice", "unknown"])
def test_stream_that_breaks_its_promise_is_an_error(
    shards: tuple[Path, Path], what: str
) -> None:
    """Red when a tensor that was lost or doubled passes silently."""

    def broken(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        pairs = list(stream_officially(files))
        if what == "lost":
            pairs.pop()
        elif what == "twice":
            pairs.append(pairs[0])
        else:
            pairs.append(("stranger", pairs[0][1]))
        yield from pairs

    with pytest.raises(LoadPlanError, match="'whole'|stranger"):
        list(run(plan_of(*shards), broken))


def test_consumers_own_error_wins_and_an_early_stop_is_one_warning(
    shards: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Red when completeness hides the first cause, or when a break is silent."""
    plan = plan_of(*shards)
    with caplog.at_level(logging.WARNING):
        with pytest.raises(ZeroDivisionError):
            for _ in run(plan):
                1 / 0  # noqa: B018
        caplog.clear()
        weights = run(plan)
        next(weights)
        weights.close()
    (record,) = caplog.records
    assert record.getMessage() == "The load was stopped after 1 of 7 tensors."


def test_unwanted_tensors_of_a_streamed_file_are_dropped(tmp_path: Path) -> None:
    """Red when the one percent that streams along reaches the model."""
    path = write_shard(
        tmp_path / "a.safetensors", [("x", "U8", (4000,)), ("no", "U8", (4,))]
    )
    plan = plan_of(path, wanted_weight=lambda name: name == "x")
    assert plan.stream_files == [str(path)]
    assert [name for name, _ in run(plan)] == ["x"]


def test_only_host_tensors_never_open_a_stream(shards: tuple[Path, Path]) -> None:
    """Red when InstantTensor is called with an empty list, which it dies of."""

    def never(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        raise AssertionError(files)

    plan = plan_of(shards[0], host_resident_weight_patterns=("whole",))
    assert [name for name, _ in run(plan, never)] == ["whole"]
    assert plan.totals()[Route.HOST].nbytes == 8


def test_row_source_of_a_tensor_without_rows_reads_nothing(tmp_path: Path) -> None:
    """An empty shard of a rank; red when zero rows divide by zero."""
    path = write_shard(tmp_path / "a.safetensors", [("e", "U8", (0, 4))])
    header = read_header(str(path))
    (tensor,) = header.tensors
    source = SafetensorsRowSource(OpenFile(header), tensor)
    source.read_rows_into(torch.empty(0, 4, dtype=torch.uint8), 0)


def test_bytes_of_is_the_tensors_own_memory() -> None:
    """Red when a copy is filled instead of the caller's memory."""
    tensor = torch.zeros(2, 3, dtype=torch.bfloat16)
    bytes_of(tensor)[:] = b"\x01" * 12
    assert bytes(tensor.view(torch.uint8).reshape(-1).numpy()) == b"\x01" * 12


def test_one_read_call_is_not_the_whole_tensor(tmp_path: Path) -> None:
    """The kernel returns less than 2 GiB a call; red when the rest is left out."""
    rows, row = (2 << 30) // 4096 + 1, 4096
    path = write_shard(
        tmp_path / "a.safetensors", [("t", "U8", (rows, row))], payload=b""
    )
    begin = path.stat().st_size
    with open(path, "r+b") as file:
        file.truncate(begin + rows * row)
        for at in (0, (2 << 30) - 4096, rows * row - 1):
            file.seek(begin + at)
            file.write(b"\x5a")
    header = read_header(str(path))
    (tensor,) = header.tensors
    source = SafetensorsRowSource(OpenFile(header), tensor)
    dst = torch.empty(rows, row, dtype=torch.uint8)
    source.read_rows_into(dst, 0)
    marks = (0, 0), ((2 << 30) // 4096 - 1, 0), (rows - 1, row - 1)
    assert [int(dst[mark]) for mark in marks] == [0x5A] * 3
    last = torch.empty(1, row, dtype=torch.uint8)
    source.read_rows_into(last, rows - 1)
    assert raw(last) == raw(dst[-1:])


@pytest.mark.parametrize("value", ["1", "true", "YES", "on"])
def test_switch_that_says_yes(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    """Red when an engine takes one of these for a no."""
    monkeypatch.setenv("LOADPLAN_DISABLE", value)
    assert flag("LOADPLAN_DISABLE") is True


@pytest.mark.parametrize("value", [None, "", "0", "false", "No", "OFF"])
def test_switch_that_says_no(
    monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    """Red when a switch that is off turns something off."""
    monkeypatch.delenv("LOADPLAN_DISABLE", raising=False)
    if value is not None:
        monkeypatch.setenv("LOADPLAN_DISABLE", value)
    assert flag("LOADPLAN_DISABLE") is False


@given(st.text(st.characters(codec="ascii", exclude_categories=["Cc"])))
def test_switch_is_used_or_refused_with_its_name_and_value(value: str) -> None:
    """Red when any other word silently means one of the two."""
    with mock.patch.dict(os.environ, LOADPLAN_DISABLE=value):
        if value.lower() in ("1", "true", "yes", "on"):
            assert flag("LOADPLAN_DISABLE")
        elif value.lower() in ("", "0", "false", "no", "off"):
            assert not flag("LOADPLAN_DISABLE")
        else:
            with pytest.raises(LoadPlanError) as caught:
                flag("LOADPLAN_DISABLE")
            assert f"LOADPLAN_DISABLE is {value!r}, expected" in str(caught.value)
