"""READ's spans: few reads, few copies, little waste, the same bytes."""

from __future__ import annotations

import itertools
import os
import resource
import threading
from pathlib import Path

import pytest
import torch
from files import write_shard
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from loadplan.core import spans
from loadplan.core.header import FileHeader, TensorHeader, read_header
from loadplan.core.plan import PlannedTensor, Route
from loadplan.core.read import reader_pool

CPU = torch.device("cpu")
MIB = 1 << 20


def entries(*ranges: tuple[int, int], path: str = "a") -> list[PlannedTensor]:
    """READ entries over ``(begin, nbytes)`` ranges of one file."""
    file = FileHeader(path, 0, (0, 0), False, None, ())
    return [
        PlannedTensor(
            file,
            TensorHeader(f"{path}{i}", "U8", (size,), begin, begin + size),
            Route.READ,
            "",
        )
        for i, (begin, size) in enumerate(ranges)
    ]


def reads(*ranges: tuple[int, int]) -> list[tuple[int, int]]:
    made = spans.make_spans(entries(*ranges))
    return [(read.offset, read.nbytes) for span in made for read in span.reads]


def test_neighbours_are_one_read_and_one_span() -> None:
    """Red when 20,000 small tensors cost 20,000 reads again."""
    (span,) = spans.make_spans(entries(*((100 * i, 100) for i in range(1000))))
    assert span.nbytes == 100_000
    assert len(span.reads) == 1


def test_small_gap_is_read_through_a_large_one_is_not() -> None:
    """4 KiB is the limit; red when it moves."""
    assert reads((0, 10 * MIB), (10 * MIB + 4096, 8)) == [(0, 10 * MIB + 4104)]
    assert reads((0, 10 * MIB), (10 * MIB + 4097, 8)) == [
        (0, 10 * MIB),
        (10 * MIB + 4097, 8),
    ]


@given(st.lists(st.tuples(st.integers(0, 6000), st.integers(0, 9000)), max_size=60))
def test_waste_never_exceeds_one_percent_and_nothing_is_read_twice(
    steps: list[tuple[int, int]],
) -> None:
    """Gaps and sizes at random; red when gaps add up to more than they may."""
    at, ranges = 0, []
    for gap, size in steps:
        ranges.append((at + gap, size))
        at += gap + size
    made = spans.make_spans(entries(*ranges))
    wanted = sum(size for _, size in ranges)
    read = sum(r.nbytes for span in made for r in span.reads)
    assert wanted <= read <= 1.01 * wanted
    found = [r for span in made for r in span.reads]
    for one, two in itertools.pairwise(found):
        assert one.offset + one.nbytes <= two.offset
    for span in made:
        for entry, begin in span.tensors:
            holders = [
                r
                for r in span.reads
                if r.begin <= begin
                and begin + entry.tensor.nbytes <= r.end
                and entry.tensor.begin - r.offset == begin - r.begin
            ]
            assert holders or not entry.tensor.nbytes


def test_span_is_bounded_but_holds_any_tensor() -> None:
    """Red when small tensors fill device memory, or a large one does not fit."""
    made = spans.make_spans(
        entries((0, 20 * MIB), (20 * MIB, 20 * MIB), (40 * MIB, 100 * MIB))
    )
    assert [span.nbytes // MIB for span in made] == [20, 20, 100]


def test_reads_of_another_file_start_aligned_in_the_same_span() -> None:
    """Red when a tensor cannot be a view because of where its read lies."""
    made = spans.make_spans(entries((3, 5)) + entries((1, 8), path="b"))
    assert [(r.file.path, r.begin) for r in made[0].reads] == [("a", 0), ("b", 512)]


def test_many_small_files_do_not_exhaust_the_descriptors(tmp_path: Path) -> None:
    """1,200 shards of one odd tensor each; red when a piece opens them all."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = []
    for number in range(1200):
        path = tmp_path / f"{number:04d}.safetensors"
        write_shard(path, [(f"t{number}", "U8", (8,))], salt=number)
        found += planned(path)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, most[1]))
    try:
        names = [name for name, _ in spans.read_tensors(found, CPU)]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, most)
    assert names == [f"t{number}" for number in range(1200)]


TENSORS = [
    ("byte", "I8", (1,)),
    ("scalar", "F32", ()),
    ("large", "BF16", (300, 7)),
    ("empty", "U8", (0, 4)),
    ("packed", "F4", (2, 8)),
    ("scale", "F8_E8M0", (3,)),
    ("tail", "C64", (40,)),
]


def official(path: Path) -> dict[str, torch.Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}


def planned(path: Path, names: set[str] | None = None) -> list[PlannedTensor]:
    header = read_header(str(path))
    return [
        PlannedTensor(header, tensor, Route.READ, "")
        for tensor in header.tensors
        if names is None or tensor.name in names
    ]


def raw(tensor: torch.Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


@settings(deadline=None, max_examples=60)
@given(
    piece=st.integers(1, 5000),
    span=st.integers(1, 5000),
    in_flight=st.integers(1, 4),
    names=st.sets(st.sampled_from([name for name, _, _ in TENSORS])),
)
def test_any_piece_and_span_size_yields_official_bytes(
    tmp_path_factory: pytest.TempPathFactory,
    piece: int,
    span: int,
    in_flight: int,
    names: set[str],
) -> None:
    """Reads that cross pieces, tensors that cross spans; red when one byte moves."""
    path = write_shard(tmp_path_factory.mktemp("s") / "a.safetensors", TENSORS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "PIECE_BYTES", piece)
        patch.setattr(spans, "_SPAN_BYTES", span)
        patch.setattr(spans, "PIECES_IN_FLIGHT", in_flight)
        pairs = list(spans.read_tensors(planned(path, names), CPU))
    expected = {n: raw(t) for n, t in official(path).items() if n in names}
    assert [name for name, _ in pairs] == [t.tensor.name for t in planned(path, names)]
    assert {name: raw(tensor) for name, tensor in pairs} == expected


def test_small_view_does_not_keep_its_span_alive(tmp_path: Path) -> None:
    """Red when a kept scalar holds 32 MiB of device memory."""
    path = write_shard(
        tmp_path / "a.safetensors", [("big", "U8", (7000,)), ("small", "U8", (100,))]
    )
    found = dict(spans.read_tensors(planned(path), CPU))
    assert found["big"].untyped_storage().nbytes() == 7100
    assert found["small"].untyped_storage().nbytes() == 100


def test_default_device_of_the_consumer_does_not_matter(tmp_path: Path) -> None:
    """Engines build models under ``torch.device(...)``; red when READ's buffers on
    the host follow it."""
    path = write_shard(tmp_path / "a.safetensors", [("x", "U8", (5,))])
    with torch.device("meta"):
        ((_, tensor),) = spans.read_tensors(planned(path), CPU)
    assert bytes(tensor.numpy()) == path.read_bytes()[-5:]


@pytest.mark.parametrize("end", ["error", "close"])
def test_nothing_runs_on_after_an_error_or_an_early_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    """Red when a thread still writes into a buffer that was given up."""
    path = write_shard(
        tmp_path / "a.safetensors", [(f"t{i}", "U8", (1000,)) for i in range(64)]
    )
    monkeypatch.setattr(spans, "PIECE_BYTES", 1000)
    monkeypatch.setattr(spans, "_SPAN_BYTES", 1000)
    running, lock, preadv = [0], threading.Lock(), os.preadv

    def counted(fd: int, buffers: list[memoryview], at: int) -> int:
        with lock:
            running[0] += 1
        try:
            return preadv(fd, buffers, at)
        finally:
            with lock:
                running[0] -= 1

    monkeypatch.setattr(os, "preadv", counted)
    weights = spans.read_tensors(planned(path), CPU)
    next(weights)
    if end == "close":
        weights.close()
    else:
        os.truncate(path, path.stat().st_size - 30_000)
        with pytest.raises(EOFError):
            list(weights)
    assert running == [0]
    assert reader_pool(4).submit(lambda: 7).result() == 7


def test_refused_pinned_memory_costs_speed_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Under a limit of locked memory; red when the load dies, or says nothing."""
    copier = spans.Copier(CPU)
    copier._pinned = True
    empty = torch.empty

    def refuse(*shape: int, pin_memory: bool = False, **options: object):
        if pin_memory:
            raise RuntimeError("CUDA error: OS call failed")
        return empty(*shape, **options)

    monkeypatch.setattr(torch, "empty", refuse)
    assert copier.take_buffer().nbytes == copier.take_buffer().nbytes
    (record,) = caplog.records
    assert "without pinned memory: CUDA error: OS call failed" in record.getMessage()
