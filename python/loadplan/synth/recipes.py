"""Synthetic DeepSeek-V4.1 checkpoints: real names, dtypes and headers, seeded bytes.

Every byte follows from the options, so a reader is checked without the files. The
values are random bits, NaNs among them: made for loading, not for inference.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from loadplan.core.header import INDEX_NAME, LoadPlanError, TensorHeader
from loadplan.synth import model as synth_model
from loadplan.synth.model import EngramTable, SynthModel, Tensor, tensor_bytes

CONFIG_NAME = "config.json"
OPTIONS_NAME = "loadplan-synth.json"

_FORMAT = 1  # of OPTIONS_NAME and of everything that follows from the options
_PART = ".part"
# Stands in OUT from the first file to the last, so that leftovers are known as ours.
_MARKER_NAME = OPTIONS_NAME + _PART

_MIN_SIZE = 8 << 20
_FRACTIONS = (0.05, 0.9)
_DENSE_SHARD_BYTES = 1 << 30
_DENSE_SHARDS = (4, 46)  # at most the published checkpoint's: 46 and two of tables

# Official safetensors lays tensors out by dtype in this order, then by name.
_DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
}

_PHILOX_BYTES = 32  # one step of the counter gives four 64-bit words
_CHUNK_BYTES = 2 << 20  # held per worker: 16 workers hold 32 MiB
_PIECE_BYTES = 16 << 20
_MAX_WORKERS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthOptions:
    """What a synthetic checkpoint looks like; equal options give equal bytes.

    Args:
        size: bytes of all tensors, met within 15 %; at least 8 MiB.
        engram_fraction: share of ``size`` that lies in the two Engram tables.
        seed: 64-bit seed of the content; names and shapes do not depend on it.
        mixed_engram: the tables lie in files that hold other tensors too, instead of
            in one file each.
        index: write ``model.safetensors.index.json``.
        draft: include the DSpark draft, ``mtp.*``.
        shards: number of safetensors files, the tables' included; None: one for each
            GiB, 4 to 46, and one for each table.

    Raises:
        LoadPlanError: a value is out of its range.
    """

    size: int = 64 << 20
    engram_fraction: float = 0.4
    seed: int = 0
    mixed_engram: bool = False
    index: bool = True
    draft: bool = True
    shards: int | None = None

    def __post_init__(self) -> None:
        low, high = _FRACTIONS
        fewest = 1 if self.mixed_engram else 3
        for name, good, rule in (
            ("size", self.size >= _MIN_SIZE, f"at least {_MIN_SIZE} bytes (8 MiB)"),
            (
                "engram_fraction",
                low <= self.engram_fraction <= high,
                f"{low} to {high}",
            ),
            ("seed", 0 <= self.seed < 1 << 64, "0 to 2**64 - 1"),
            (
                "shards",
                self.shards is None or self.shards >= fewest,
                f"at least {fewest} files with mixed_engram {self.mixed_engram}",
            ),
        ):
            if not good:
                raise LoadPlanError(
                    f"{name}: got {getattr(self, name)!r}, expected {rule}"
                )


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """One safetensors file, its tensors in the order of their bytes."""

    name: str
    tensors: tuple[TensorHeader, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file, header included."""
        return self.tensors[-1].end


def content(seed: int, name: str, start: int, stop: int) -> np.ndarray:
    """Return bytes ``[start, stop)`` of tensor ``name`` as a new 1-D ``uint8`` array.

    Pure, and no dearer in the middle of a tensor than at its start: the generator
    counts, keyed by seed and name.
    """
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=16).digest()
    first = start // _PHILOX_BYTES
    steps = -(-stop // _PHILOX_BYTES) - first
    generator = np.random.Philox(key=int.from_bytes(digest, "little"), counter=first)
    words = generator.random_raw(4 * steps).astype("<u8", copy=False)
    skip = start - first * _PHILOX_BYTES
    return words.view(np.uint8)[skip : skip + stop - start]


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's dtype of a tensor whose header says ``name``."""
    return _DTYPES[name]


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


def read_options(folder: Path) -> SynthOptions | None:
    """Return the options that a finished ``folder`` was made with, None if not ours.

    Raises:
        LoadPlanError: the record is unreadable or of another format version.
    """
    path = Path(folder) / OPTIONS_NAME
    return _parse_record(path) if path.exists() else None


def synthesize(
    out: Path,
    options: SynthOptions,
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the checkpoint into ``out``: a missing or empty folder, or a run of the
    same options that was cut short, whose finished files are kept.

    A file appears under its name only when it is whole; ``loadplan-synth.json`` comes
    last. ``progress`` is called in this thread with bytes that are done; their sum is
    the sum of the files' sizes. About 64 MiB are held, whatever the size.

    Raises:
        LoadPlanError: ``out`` holds anything else, or its disk is too small.
        OSError: a write failed; call again with the same options to go on.
    """
    out = Path(out)
    shards = layout(options)
    _claim(out, options, shards=shards)
    done = progress if progress is not None else lambda written: None
    finished = {shard.name for shard in shards if (out / shard.name).exists()}
    _check_space(out, sum(s.nbytes for s in shards if s.name not in finished))
    with ThreadPoolExecutor(min(os.cpu_count() or 1, _MAX_WORKERS)) as pool:
        for shard in shards:
            if shard.name in finished:
                done(shard.nbytes)
            else:
                _write_shard(out, shard, seed=options.seed, pool=pool, done=done)
    for name, value in _json_files(options, shards).items():
        _write(out / name, _json_bytes(value))
    os.replace(out / _MARKER_NAME, out / OPTIONS_NAME)


def damaged_files(folder: Path, options: SynthOptions) -> list[str]:
    """Return the files of ``folder`` that differ outside of their tensors' bytes.

    Headers, index and config follow from the options like everything else.
    """
    shards = layout(options)
    expected = {shard.name: _header(shard.tensors) for shard in shards}
    for name, value in _json_files(options, shards).items():
        expected[name] = _json_bytes(value)
    damaged = []
    for name, content in expected.items():
        with open(folder / name, "rb") as file:
            if file.read(len(content)) != content:
                damaged.append(name)
    return damaged


def _model(options: SynthOptions) -> SynthModel:
    return synth_model.fit_model(
        options.size, engram_fraction=options.engram_fraction, draft=options.draft
    )


def _place(model: SynthModel, options: SynthOptions) -> list[list[Tensor]]:
    """Divide the tensors over files: runs of equal bytes, then the tables.

    A table follows its own layer's weights, in their file or in the next one, so that
    table files stand among the others.
    """
    dense = list(synth_model.dense_tensors(model))
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
    order = list(_DTYPES)
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


def _json_files(
    options: SynthOptions, shards: tuple[ShardSpec, ...]
) -> dict[str, dict[str, object]]:
    files = {CONFIG_NAME: synth_model.config(_model(options))}
    return {INDEX_NAME: _index(shards), **files} if options.index else files


def _claim(out: Path, options: SynthOptions, *, shards: tuple[ShardSpec, ...]) -> None:
    """Mark ``out`` as ours, or refuse it untouched."""
    if out.exists() and not out.is_dir():
        raise LoadPlanError(f"{out}: is not a folder, expected one; choose another")
    present = set(os.listdir(out)) if out.exists() else set()
    if not present:
        out.mkdir(parents=True, exist_ok=True)
        record = {"format": _FORMAT, "options": dataclasses.asdict(options)}
        _write(out / _MARKER_NAME, _json_bytes(record))
        return
    names = {INDEX_NAME, CONFIG_NAME, *(shard.name for shard in shards)}
    ours = names | {name + _PART for name in names} | {_MARKER_NAME}
    foreign = sorted(present if _MARKER_NAME not in present else present - ours)
    if foreign:
        raise LoadPlanError(
            f"{out}: the folder holds {foreign[0]!r} ({len(present)} entries in all), "
            "expected an empty or missing folder; choose another or remove it"
        )
    begun = _parse_record(out / _MARKER_NAME)
    if begun != options:
        raise LoadPlanError(
            f"{out}: holds an unfinished checkpoint of {begun!r}, expected "
            f"{options!r}; go on with its options or remove the folder"
        )


def _check_space(out: Path, needed: int) -> None:
    free = shutil.disk_usage(out).free
    if needed > free:
        raise LoadPlanError(
            f"{out}: the disk has {free} bytes free, expected {needed} bytes at least; "
            "ask for a smaller size or choose another folder"
        )


def _parse_record(path: Path) -> SynthOptions:
    try:
        record = json.loads(path.read_text())
        if record["format"] != _FORMAT:
            raise ValueError(f"format {record['format']!r}")
        return SynthOptions(**record["options"])
    except (ValueError, TypeError, KeyError) as error:
        raise LoadPlanError(
            f"{path}: got {error}, expected the options of a synthetic checkpoint of "
            f"format {_FORMAT}; remove the folder and make it again"
        ) from error


def _json_bytes(value: object) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + _PART)
    part.write_bytes(content)
    os.replace(part, path)


def _write_shard(
    out: Path,
    shard: ShardSpec,
    *,
    seed: int,
    pool: ThreadPoolExecutor,
    done: Callable[[int], None],
) -> None:
    part = out / (shard.name + _PART)
    with open(part, "wb", buffering=0) as file:
        header = _header(shard.tensors)
        _write_at(file.fileno(), header, 0)
        done(len(header))

        def write_piece(piece: tuple[TensorHeader, int, int]) -> int:
            tensor, start, stop = piece
            for at in range(start, stop, _CHUNK_BYTES):
                chunk = content(seed, tensor.name, at, min(at + _CHUNK_BYTES, stop))
                _write_at(file.fileno(), chunk, tensor.begin + at)
            return stop - start

        pieces = (
            (tensor, start, min(start + _PIECE_BYTES, tensor.nbytes))
            for tensor in shard.tensors
            for start in range(0, tensor.nbytes, _PIECE_BYTES)
        )
        # Closing cancels what has not begun, so that an error stops the run at once.
        with contextlib.closing(pool.map(write_piece, pieces)) as written:
            for nbytes in written:
                done(nbytes)
    os.replace(part, out / shard.name)


def _write_at(fd: int, data: bytes | np.ndarray, offset: int) -> None:
    view = memoryview(data)
    while view:
        count = os.pwrite(fd, view, offset)
        view, offset = view[count:], offset + count
