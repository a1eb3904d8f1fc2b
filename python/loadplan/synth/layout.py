"""Which file of a synthetic checkpoint holds which tensor, and all but their bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from loadplan.core.header import INDEX_NAME, LoadPlanError, TensorHeader
from loadplan.synth.config import config
from loadplan.synth.content import DTYPES
from loadplan.synth.fit import fit_model
from loadplan.synth.model import EngramTable, SynthModel, Tensor, tensor_bytes
from loadplan.synth.options import SynthOptions
from loadplan.synth.tensors import dense_tensors

CONFIG_NAME = "config.json"

_DENSE_SHARD_BYTES = 1 << 30
_DENSE_SHARDS = (4, 46)  # at most the published checkpoint's: 46 and two of tables


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One safetensors file, its tensors in the order of their bytes."""

    name: str
    tensors: tuple[TensorHeader, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file, header included."""
        return self.tensors[-1].end


def layout(options: SynthOptions) -> tuple[ShardSpec, ...]:
    """Return every file that ``synthesize`` writes, without touching the disk.

    Raises:
        LoadPlanError: ``size`` or ``shards`` cannot be met.
    """
    model = _model(options)
    files = _place(model, options)
    return tuple(
        _spec(f"model-{number:05d}-of-{len(files):05d}.safetensors", tensors)
        for number, tensors in enumerate(files, start=1)
    )


def engram_tables(options: SynthOptions) -> tuple[EngramTable, ...]:
    """Return the Engram layers' tables, by layer."""
    return _model(options).tables


def headers(shards: Iterable[ShardSpec]) -> dict[str, bytes]:
    """By file, the bytes before its first tensor."""
    return {shard.name: _header(shard.tensors) for shard in shards}


def json_files(
    options: SynthOptions, shards: tuple[ShardSpec, ...]
) -> dict[str, bytes]:
    """Every file beside the shards by its name."""
    files = {INDEX_NAME: _index(shards)} if options.index else {}
    files[CONFIG_NAME] = config(_model(options))
    return {name: json_bytes(value) for name, value in files.items()}


def json_bytes(value: object) -> bytes:
    """The text of ``value`` as these files hold it."""
    return (json.dumps(value, indent=2) + "\n").encode()


def _model(options: SynthOptions) -> SynthModel:
    return fit_model(
        options.size, engram_fraction=options.engram_fraction, draft=options.draft
    )


def _place(model: SynthModel, options: SynthOptions) -> list[list[Tensor]]:
    """Divide the tensors over files: runs of equal bytes, then the tables.

    A table follows its own layer's weights, in their file or in the next one, so that
    table files stand among the others.
    """
    dense = list(dense_tensors(model))
    sizes = [tensor_bytes(tensor) for tensor in dense]
    total = sum(sizes)
    extra = 0 if options.mixed_engram else len(model.tables)
    if options.shards is None:
        low, high = _DENSE_SHARDS
        # A run no shorter than the largest tensor is never left without one.
        run_bytes = max(_DENSE_SHARD_BYTES, *sizes)
        count = min(max(total // run_bytes, low), high)
    else:
        count = options.shards - extra
    runs: list[list[Tensor]] = [[] for _ in range(count)]
    offset = 0
    for tensor, size in zip(dense, sizes, strict=True):
        runs[offset * count // total].append(tensor)
        offset += size
    if not all(runs):
        raise LoadPlanError(
            f"shards: got {options.shards!r}, of which {runs.count([])} would be "
            "empty, expected a tensor in each; ask for fewer or for a larger size"
        )
    files = []
    for run in runs:
        names = {name for name, _, _ in run}
        here = [
            list(table.tensors)
            for table in model.tables
            if f"layers.{table.layer_id}.engram.wkv.weight" in names
        ]
        files += [sum(here, run)] if options.mixed_engram else [run, *here]
    return files


def _spec(name: str, tensors: Iterable[Tensor]) -> ShardSpec:
    order = list(DTYPES)
    ordered = sorted(tensors, key=lambda t: (order.index(t[1]), t[0]))
    specs, offset = [], 0
    for tensor in ordered:
        end = offset + tensor_bytes(tensor)
        specs.append(TensorHeader(*tensor, offset, end))
        offset = end
    start = len(_header(specs))
    return ShardSpec(
        name,
        tuple(
            spec._replace(begin=spec.begin + start, end=spec.end + start)
            for spec in specs
        ),
    )


def _header(tensors: Iterable[TensorHeader]) -> bytes:
    """The file's bytes before the first tensor, as official safetensors writes them."""
    tensors = tuple(tensors)
    start = tensors[0].begin
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for tensor in tensors:
        entries[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [tensor.begin - start, tensor.end - start],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts at a multiple of 8
    return len(text).to_bytes(8, "little") + text


def _index(shards: Iterable[ShardSpec]) -> dict[str, object]:
    tensors = [(t.name, s.name, t.nbytes) for s in shards for t in s.tensors]
    return {
        "metadata": {"total_size": sum(nbytes for _, _, nbytes in tensors)},
        "weight_map": {name: shard for name, shard, _ in sorted(tensors)},
    }
