"""Synthetic DeepSeek-V4.1 checkpoints: real names, dtypes and headers, seeded bytes.

Every byte follows from the options, so a reader is checked without the files. The
values are random bits, NaNs among them: made for loading, not for inference.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from loadplan.core.header import INDEX_NAME, LoadPlanError, TensorHeader
from loadplan.synth.content import content
from loadplan.synth.layout import (
    CONFIG_NAME,
    ShardSpec,
    headers,
    json_bytes,
    json_files,
    layout,
)
from loadplan.synth.options import (
    OPTIONS_NAME,
    SynthOptions,
    option_values,
    parse_options,
)

_PART = ".part"
# Stands in OUT from the first file to the last, so that leftovers are known as ours.
_MARKER_NAME = OPTIONS_NAME + _PART

_CHUNK_BYTES = 2 << 20  # held per worker: 16 workers hold 32 MiB
_PIECE_BYTES = 16 << 20
_MAX_WORKERS = 16


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
    for name, text in json_files(options, shards).items():
        _write(out / name, text)
    os.replace(out / _MARKER_NAME, out / OPTIONS_NAME)


def damaged_files(folder: Path, options: SynthOptions) -> list[str]:
    """Return the files of ``folder`` that differ outside of their tensors' bytes.

    Headers, index and config follow from the options like everything else.
    """
    shards = layout(options)
    expected = headers(shards) | json_files(options, shards)
    damaged = []
    for name, wanted in expected.items():
        with open(folder / name, "rb") as file:
            if file.read(len(wanted)) != wanted:
                damaged.append(name)
    return damaged


def _claim(out: Path, options: SynthOptions, *, shards: tuple[ShardSpec, ...]) -> None:
    """Mark ``out`` as ours, or refuse it untouched."""
    if out.exists() and not out.is_dir():
        raise LoadPlanError(f"{out}: is not a folder, expected one; choose another")
    present = set(os.listdir(out)) if out.exists() else set()
    if not present:
        out.mkdir(parents=True, exist_ok=True)
        _write(out / _MARKER_NAME, json_bytes(option_values(options)))
        return
    names = {INDEX_NAME, CONFIG_NAME, *(shard.name for shard in shards)}
    ours = names | {name + _PART for name in names} | {_MARKER_NAME}
    foreign = sorted(present if _MARKER_NAME not in present else present - ours)
    if foreign:
        raise LoadPlanError(
            f"{out}: the folder holds {foreign[0]!r} ({len(present)} entries in all), "
            "expected an empty or missing folder; choose another or remove it"
        )
    begun = parse_options(out / _MARKER_NAME)
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


def _write(path: Path, text: bytes) -> None:
    part = path.with_name(path.name + _PART)
    part.write_bytes(text)
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
        header = headers([shard])[shard.name]
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
