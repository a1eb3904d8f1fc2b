"""READ by all ranks of a group: every byte is read once and arrives on every rank."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from files import write_shard
from gloo_ranks import on_ranks
from safetensors import safe_open

from loadplan.core import broadcast, spans
from loadplan.core.header import read_header
from loadplan.core.loading import decide_routes, run_load
from loadplan.core.plan import LoadPlan, Route
from loadplan.core.read import OpenFile

CPU = torch.device("cpu")

# One larger than a stripe, a scalar at an odd offset, an empty one, many small ones.
TENSORS = [
    ("byte", "I8", (1,)),
    ("large", "U8", (7, 300)),
    ("scalar", "F32", ()),
    ("empty", "U8", (0, 4)),
    ("scale", "F8_E8M0", (3,)),
    *[(f"small{i:02}", "BF16", (i % 5 + 1, 9)) for i in range(40)],
]


@pytest.fixture
def small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spans, pieces and the threshold so small that a test file has many of them."""
    monkeypatch.setattr(spans, "PIECE_BYTES", 64)
    monkeypatch.setattr(spans, "_SPAN_BYTES", 256)
    monkeypatch.setattr(broadcast, "LEAST_SHARED_BYTES", 1)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    path = tmp_path / "a.safetensors"
    write_shard(path, TENSORS)
    return path


def plan(checkpoint: Path) -> LoadPlan:
    return decide_routes([read_header(str(checkpoint))], reader="read")


def raw(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    flat = bytes(tensor.reshape(-1).view(torch.uint8).numpy())
    return str(tensor.dtype), tuple(tensor.shape), flat


def load(plan: LoadPlan) -> list[tuple[str, tuple]]:
    pairs = run_load(
        plan,
        stream_files=lambda files: pytest.fail("nothing is streamed"),
        device=CPU,
        group=dist.group.WORLD,
        device_group=dist.group.WORLD,
    )
    return [(name, raw(tensor)) for name, tensor in pairs]


def counted(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> tuple:
    """What this rank got, and how many bytes it read itself."""
    sizes = []
    read_into = OpenFile.read_into

    def read(self: OpenFile, buffer: memoryview, offset: int) -> None:
        sizes.append(len(buffer))
        read_into(self, buffer, offset)

    monkeypatch.setattr(OpenFile, "read_into", read)
    return load(plan(checkpoint)), sum(sizes)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_share_the_bytes_and_all_get_every_tensor(
    tmp_path: Path,
    checkpoint: Path,
    small_units: None,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
) -> None:
    """Red when ranks read a byte twice, one gets other bytes, or another order."""
    with safe_open(checkpoint, framework="pt") as file:
        official = {name: raw(file.get_tensor(name)) for name in file.keys()}
    target = functools.partial(counted, checkpoint, monkeypatch)
    outcomes = on_ranks(tmp_path, target, ranks=ranks)
    found, sizes = zip(*(result for _, result in outcomes), strict=True)
    assert dict(found[0]) == official
    assert all(pairs == found[0] for pairs in found)
    payload = sum(entry.tensor.nbytes for entry in plan(checkpoint).entries)
    # Alignment inside a span is not read: exactly once between them.
    assert sum(sizes) == payload
    assert max(sizes) < payload / ranks * 2


def load_in_own_order(paths: list[Path], rank: int) -> list:
    headers = [read_header(str(path)) for path in paths]
    return load(decide_routes(headers[rank:] + headers[:rank], reader="read"))


def test_ranks_that_list_the_files_in_another_order_get_the_same(
    tmp_path: Path, small_units: None
) -> None:
    """Files staggered by rank, or listed by glob on two nodes; red when a rank takes
    what a peer sends for what it has planned itself."""
    paths = [tmp_path / f"{name}.safetensors" for name in "ab"]
    official = {}
    for salt, path in enumerate(paths):
        tensors = [(f"{path.stem}.{name}", *rest) for name, *rest in TENSORS]
        write_shard(path, tensors, salt=salt)
        with safe_open(path, framework="pt") as file:
            official.update({name: raw(file.get_tensor(name)) for name in file.keys()})
    outcomes = on_ranks(tmp_path, functools.partial(load_in_own_order, paths))
    assert [kind for kind, _ in outcomes] == ["result"] * 2
    assert all(dict(pairs) == official for _, pairs in outcomes)
    assert outcomes[0] == outcomes[1]


def most_ahead(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> int:
    """The most bytes of spans that were allocated and not yielded yet."""
    held = [0]
    allocate = spans.Copier.allocate

    def counting(self: spans.Copier, nbytes: int) -> torch.Tensor:
        held.append(held[-1] + (nbytes if nbytes > 4 else 0))
        return allocate(self, nbytes)

    monkeypatch.setattr(spans.Copier, "allocate", counting)
    made = spans.make_spans(plan(checkpoint).entries)
    for span, _ in broadcast.fill_together(made, CPU, group=dist.group.WORLD):
        held.append(held[-1] - span.nbytes)
    assert held[-1] == 0
    return max(held)


@pytest.mark.parametrize(
    ("sizes", "most"),
    [
        ([3000] * 4, 3000),
        ([3000, 200, 200, 3000, 200], 3000),
        ([1100, 300] * 6, 2000),
        ([200] * 40, 2000),
    ],
)
def test_memory_ahead_is_bounded_whatever_the_size_of_a_tensor(
    tmp_path: Path,
    small_units: None,
    monkeypatch: pytest.MonkeyPatch,
    sizes: list[int],
    most: int,
) -> None:
    """Red when a second large tensor is allocated while the first is under way."""
    monkeypatch.setattr(broadcast, "_MOST_BYTES", 2000)
    path = tmp_path / "a.safetensors"
    write_shard(path, [(f"t{i:02}", "U8", (size,)) for i, size in enumerate(sizes)])
    outcomes = on_ranks(tmp_path, functools.partial(most_ahead, path, monkeypatch))
    assert [kind for kind, _ in outcomes] == ["result"] * 2, outcomes
    assert all(0 < found <= most for _, found in outcomes)


def fail_on_rank(checkpoint: Path, failing: int, rank: int) -> list:
    planned = plan(checkpoint)
    if rank == failing:
        with open(checkpoint, "r+b") as file:
            file.truncate(checkpoint.stat().st_size // 2)
    return load(planned)


@pytest.mark.parametrize("failing", [0, 1])
def test_rank_that_cannot_read_is_named_on_all(
    tmp_path: Path, small_units: None, failing: int
) -> None:
    """Each rank has a copy, one is cut; red when a peer waits or gets wrong bytes."""
    paths = [tmp_path / f"{rank}.safetensors" for rank in range(2)]
    for path in paths:
        write_shard(path, TENSORS)
    outcomes = on_ranks(tmp_path, lambda rank: fail_on_rank(paths[rank], failing, rank))
    kinds = [kind for kind, _ in outcomes]
    assert kinds[failing] == "ShortFileError"
    assert kinds[1 - failing] == "LoadPlanError"
    text = outcomes[1 - failing][1]
    assert f"rank {failing} of 2 failed: ShortFileError: {paths[failing]}" in text


def without_room(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> list:
    allocate = spans.Copier.allocate

    def small_only(self: spans.Copier, nbytes: int) -> torch.Tensor:
        if nbytes > 256:
            raise torch.OutOfMemoryError("out of memory")
        return allocate(self, nbytes)

    if rank == 1:
        monkeypatch.setattr(spans.Copier, "allocate", small_only)
    return load(plan(checkpoint))


def test_rank_without_memory_for_a_tensor_is_named_on_all(
    tmp_path: Path,
    checkpoint: Path,
    small_units: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a rank that is out of memory leaves its peers in a broadcast."""
    target = functools.partial(without_room, checkpoint, monkeypatch)
    peer, failing = on_ranks(tmp_path, target)
    assert failing == ("OutOfMemoryError", "out of memory")
    assert peer[0] == "LoadPlanError"
    assert "rank 1 of 2 failed: OutOfMemoryError: out of memory" in peer[1]


def alone(checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rank: int) -> tuple:
    monkeypatch.setattr(broadcast.dist, "broadcast", lambda *a, **k: pytest.fail("!"))
    return counted(checkpoint, monkeypatch, rank)


def test_small_selection_is_read_by_each_rank_alone(
    tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Red when a few bytes cost an exchange."""
    outcomes = on_ranks(tmp_path, functools.partial(alone, checkpoint, monkeypatch))
    payload = sum(entry.tensor.nbytes for entry in plan(checkpoint).entries)
    assert [kind for kind, _ in outcomes] == ["result"] * 2
    assert [size for _, (_, size) in outcomes] == [payload] * 2


def test_without_streaming_every_device_tensor_is_read(checkpoint: Path) -> None:
    """Red when LOADPLAN_STREAM_READER=read leaves a file to InstantTensor."""
    routes = {entry.route for entry in plan(checkpoint).entries}
    assert routes == {Route.READ}
