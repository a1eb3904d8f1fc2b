"""Any checkpoint: official safetensors' bytes for what is wanted, or a named error.

Random tensors, dtypes, shapes, files, index states, patterns and wanted sets, then
random damage, through the plan, the readers and the strict stub of InstantTensor. The
oracle knows official safetensors and the rule of ownership, and nothing of the plan.

LOADPLAN_EXAMPLES=1000000 runs as many examples of each property.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from loadplan.core.header import _DTYPES, LoadPlanError, read_headers, read_index
from loadplan.core.loading import decide_routes, run_load
from loadplan.standin import gpu

EXAMPLES = int(os.environ.get("LOADPLAN_EXAMPLES", "1500"))
PROPERTY = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
NAMES = ("embed.weight", "embed.scale", "a.embed", "b", "b.c", "mtp.0.b", "norm")
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file: tensors in the order of their bytes, listed in ``listing``'s order."""

    tensors: tuple[tuple[str, str, tuple[int, ...]], ...]
    listing: tuple[int, ...]
    metadata: dict[str, str] | None
    in_memory: bool


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """``index`` maps names to file numbers; None: no index."""

    shards: tuple[Shard, ...]
    index: dict[str, int] | None
    patterns: tuple[str, ...]
    wanted: frozenset[str] | None


@st.composite
def shards(draw: st.DrawFn) -> Shard:
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=5))
    tensors = []
    for name in names:
        dtype = draw(st.sampled_from(sorted(_DTYPES)))
        shape = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        if math.prod(shape) * _DTYPES[dtype][0] % 8 == 0:
            tensors.append((name, dtype, shape))
    return Shard(
        tensors=tuple(tensors),
        listing=tuple(draw(st.permutations(range(len(tensors))))),
        metadata=draw(st.sampled_from([None, {}, {"format": "pt"}, {"format": "mlx"}])),
        in_memory=draw(st.integers(0, 9)) == 0,
    )


@st.composite
def checkpoints(draw: st.DrawFn) -> Checkpoint:
    found = tuple(draw(st.lists(shards(), min_size=1, max_size=4)))
    index = None
    if draw(st.booleans()):
        holders = collections.defaultdict(list)
        for number, shard in enumerate(found):
            for name, _, _ in shard.tensors:
                holders[name].append(number)
        index = {
            name: draw(st.sampled_from(owners)) for name, owners in holders.items()
        }
        if index and draw(st.integers(0, 9)) == 0:
            del index[draw(st.sampled_from(sorted(index)))]
        if draw(st.integers(0, 19)) == 0:
            index["gone"] = 0
    some = st.lists(st.sampled_from(NAMES), max_size=2)
    wanted = draw(st.none() | st.frozensets(st.sampled_from(NAMES)))
    return Checkpoint(found, index, tuple(draw(some)), wanted)


def write(checkpoint: Checkpoint, folder: Path, memory: Path) -> None:
    for number, shard in enumerate(checkpoint.shards):
        begin, entries = 0, []
        for name, dtype, shape in shard.tensors:
            end = begin + math.prod(shape) * _DTYPES[dtype][0] // 8
            entry = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
            entries.append((name, entry))
            begin = end
        header = dict(entries[i] for i in shard.listing)
        if shard.metadata is not None:
            header = {"__metadata__": shard.metadata, **header}
        text = json.dumps(header).encode()
        payload = bytes((31 * number + 7 * i + 3) % 251 for i in range(begin))
        path = folder / f"model-{number}.safetensors"
        if shard.in_memory:
            path.symlink_to(memory / path.name)
        path.write_bytes(struct.pack("<Q", len(text)) + text + payload)
    if checkpoint.index is not None:
        weight_map = {n: f"model-{i}.safetensors" for n, i in checkpoint.index.items()}
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


Raw = tuple[torch.dtype, tuple[int, ...], bytes]


def raw(tensor: torch.Tensor) -> Raw:
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    return tensor.dtype, tuple(tensor.shape), bytes(flat.numpy())


def oracle(folder: Path, wanted: frozenset[str] | None) -> dict[str, Raw] | None:
    """What must arrive, None for a checkpoint that must be refused."""
    paths = sorted(folder.glob("*.safetensors"))
    owners: dict[str, Path] = {}
    holders: dict[str, list[Path]] = collections.defaultdict(list)
    for path in paths:
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    holders[name].append(path)
        except SafetensorError:
            return None
    try:
        weight_map = json.loads((folder / INDEX).read_bytes())["weight_map"]
        for name, shard in weight_map.items():
            if os.path.isabs(shard) or ".." in shard.split("/"):
                return None
            if folder / shard in paths:
                owners[name] = folder / shard
    except FileNotFoundError:
        pass
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not holders or any(path not in holders[name] for name, path in owners.items()):
        return None
    found = {}
    for name, candidates in holders.items():
        is_wanted = wanted is None or name in wanted
        if is_wanted and name not in owners and len(candidates) > 1:
            return None
        if wanted is None or name in wanted:
            path = owners.get(name, candidates[0])
            try:
                with safe_open(path, framework="pt") as file:
                    found[name] = raw(file.get_tensor(name))
            except SafetensorError:
                return None
    return found


def load(folder: Path, checkpoint: Checkpoint) -> list[tuple[str, Raw]]:
    """Through plan and readers; InstantTensor is the stub."""
    wanted = checkpoint.wanted
    plan = decide_routes(
        read_headers([str(path) for path in sorted(folder.glob("*.safetensors"))]),
        weight_map=read_index(str(folder)),
        host_resident_weight_patterns=checkpoint.patterns,
        wanted_weight=None if wanted is None else wanted.__contains__,
    )
    journal = gpu.Journal()
    stub = gpu.make_module(journal=journal)

    def stream(files: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        with stub.safe_open(files, framework="pt", device=0) as opened:
            yield from opened.tensors()

    pairs = []
    for name, tensor in run_load(plan, stream_files=stream, device=torch.device("cpu")):
        if any(pattern in name for pattern in checkpoint.patterns):
            assert not journal.on_device(tensor), name
        pairs.append((name, raw(tensor)))
    assert len(journal.calls) <= 1
    return pairs


def check(folder: Path, checkpoint: Checkpoint) -> None:
    expected = oracle(folder, checkpoint.wanted)
    if expected is None:
        with pytest.raises(LoadPlanError):
            load(folder, checkpoint)
        return
    pairs = load(folder, checkpoint)
    assert len(pairs) == len(expected)
    assert dict(pairs) == expected


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    folder = Path("/dev/shm", f"loadplan-properties-{os.getpid()}")
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


@PROPERTY
@given(checkpoint=checkpoints())
def test_stream_yields_official_bytes_once_or_a_named_error(
    memory: Path, checkpoint: Checkpoint
) -> None:
    """Red when any checkpoint loads other bytes, a name twice, or fails unnamed."""
    with tempfile.TemporaryDirectory() as folder:
        write(checkpoint, Path(folder), memory)
        check(Path(folder), checkpoint)


def damaged(content: bytes, damage: tuple[str, int, int]) -> bytes:
    kind, at, value = damage
    at %= max(len(content), 1)
    if kind == "flip":
        flipped = content[at] ^ (value or 1) if content else value
        return content[:at] + bytes([flipped]) + content[at + 1 :]
    if kind == "cut":
        return content[:at]
    if kind == "insert":
        return content[:at] + bytes([value]) + content[at:]
    return content[:at] + content[at + 1 :]


KINDS = st.sampled_from(["flip", "flip", "flip", "cut", "insert", "delete"])
DAMAGE = st.tuples(KINDS, st.integers(0, 4000), st.integers(0, 255))
ONE = Shard((("b", "U8", (4,)), ("norm", "BF16", (2,))), (0, 1), None, False)


@PROPERTY
@given(checkpoint=checkpoints(), which=st.integers(0, 4), damage=DAMAGE)
@example(Checkpoint((ONE,), {"b": 0}, (), None), 4, ("flip", 30, 1))
@example(Checkpoint((ONE,), None, (), None), 0, ("cut", 0, 0))
@example(Checkpoint((ONE,), None, (), None), 0, ("flip", 7, 255))
def test_damage_gets_the_official_verdict_or_a_named_error(
    memory: Path, checkpoint: Checkpoint, which: int, damage: tuple[str, int, int]
) -> None:
    """Red when a broken header, index or payload becomes wrong bytes or a crash."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(checkpoint, folder, memory)
        targets = [*sorted(folder.glob("*.safetensors")), folder / INDEX]
        target = targets[which % len(targets)]
        assume(target.exists())
        target.write_bytes(damaged(target.read_bytes(), damage))
        check(folder, checkpoint)
