"""The output head of a checkpoint: where it is, in what format, and unquantised."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import torch

from loadplan.core.header import LoadPlanError, TensorHeader
from loadplan.drafter import safetensors_file
from loadplan.drafter.checkpoint import Checkpoint, in_draft

FLOATING = ("F32", "F16", "BF16")
# What heads are called, the usual name first. The others are looked for only outside
# of numbered layers.
_NAMES = ("lm_head", "head", "output", "embed_out")
# Found beside a head's weight in one format or another.
_PARTS = {
    "weight",
    "bias",
    "weight_packed",
    "weight_scale",
    "weight_shape",
    "weight_zero_point",
    "weight_global_scale",
    "weight_g_idx",
    "input_global_scale",
    "input_scale",
    "weight_scale_2",
    "qweight",
    "qzeros",
    "scales",
    "g_idx",
}
# The tensor that holds the values, by format.
_VALUES = {
    "weight": "floating",
    "weight_packed": "packed",
    "qweight": "auto-gptq",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Head:
    """The head's module and tensors; ``format`` is how the index has it now.

    ``tensors`` is by the name behind the module's, ``shards`` has the files that hold
    any of them, the one with the values first. The head has ``rows`` x ``width``.
    """

    name: str
    format: str
    rows: int
    width: int
    tensors: dict[str, TensorHeader]
    shards: tuple[str, ...]


def find_head(checkpoint: Checkpoint, name: str | None = None) -> Head:
    """The target's head, or the module ``name``.

    Raises:
        LoadPlanError: none, several, or its shape is not the configuration's.
    """
    name = _find_name(checkpoint) if name is None else name
    tensors = {
        part: checkpoint.tensor(f"{name}.{part}")
        for part in sorted(_PARTS)
        if f"{name}.{part}" in checkpoint.weight_map
    }
    values = next((part for part in _VALUES if part in tensors), None)
    if values is None:
        raise LoadPlanError(
            f"{checkpoint.folder}: {name!r} has {sorted(tensors) or 'no tensors'}, "
            f"expected one of {sorted(_VALUES)}; name the head by --head-name"
        )
    found = _VALUES[values]
    if found == "floating" and tensors[values].dtype not in FLOATING:
        found = tensors[values].dtype
    if found == "packed":
        packed = tensors[values].dtype
        found = "nvfp4-pack-quantized" if packed == "U8" else "pack-quantized"
    shape = tensors[values].shape
    if len(shape) != 2:
        raise LoadPlanError(
            f"{checkpoint.folder}: {name}.{values} has shape {list(shape)}, expected "
            "two dimensions"
        )
    rows = checkpoint.vocabulary or (shape[1] if values == "qweight" else shape[0])
    width = checkpoint.width or shape[1]
    if values == "weight" and shape != (rows, width):
        raise LoadPlanError(
            f"{checkpoint.folder}: {name}.weight has shape {list(shape)}, expected "
            f"{[rows, width]} as in config.json; is this the model's head?"
        )
    first = checkpoint.weight_map[f"{name}.{values}"]
    shards = {checkpoint.weight_map[f"{name}.{part}"] for part in tensors}
    return Head(
        name=name,
        format=found,
        rows=rows,
        width=width,
        tensors=tensors,
        shards=(first, *sorted(shards - {first})),
    )


def read_float_head(checkpoint: Checkpoint, head: Head) -> tuple[torch.Tensor, Path]:
    """The unquantised head, ``[rows, width]`` in its own dtype, and where it was.

    It is in the backup beside the head's shard. Where the index's own head is
    floating, there may be no backup; if there is one, it must hold the same.

    Raises:
        LoadPlanError: no such head, a backup without one, or two that differ.
    """
    found = {}
    for shard in head.shards:
        for backup in checkpoint.backups[shard]:
            path = checkpoint.path(backup)
            found[path] = _read_backup(path, head)
    if head.format == "floating":
        shard = checkpoint.path(head.shards[0])
        found[shard] = safetensors_file.read(shard, head.tensors["weight"])
    if not found:
        shard = head.shards[0]
        raise LoadPlanError(
            f"{checkpoint.folder}: the head {head.name!r} is {head.format} in {shard}, "
            f"and neither {shard}.bak nor {shard}.bak-orig is there, expected a "
            "backup with the unquantised head; copy it there from the original model"
        )
    hashes = {path: digest(tensor) for path, tensor in found.items()}
    if len(set(hashes.values())) > 1:
        named = ", ".join(f"{path.name} ({d[:12]})" for path, d in hashes.items())
        raise LoadPlanError(
            f"{checkpoint.folder}: the unquantised heads differ: {named}, expected one "
            "or equal ones; move away what is not the original model's"
        )
    path = next(iter(found))
    return found[path], path


def _read_backup(path: Path, head: Head) -> torch.Tensor:
    wanted = f"{head.name}.weight"
    header = safetensors_file.read_header(path)
    held = {t.name: t for t in header.tensors if t.name.startswith(f"{head.name}.")}
    tensor = held.get(wanted)
    if tensor is None:
        raise LoadPlanError(
            f"{path}: holds {sorted(held) or 'nothing'} of the head, expected a "
            f"floating {wanted!r}; it is no backup of the unquantised head, move it "
            "away or put the original there"
        )
    if tensor.dtype not in FLOATING or tensor.shape != (head.rows, head.width):
        raise LoadPlanError(
            f"{path}: {wanted!r} is {tensor.dtype} of shape {list(tensor.shape)}, "
            f"expected one of {FLOATING} of shape {[head.rows, head.width]}; move "
            "this file away or put the original there"
        )
    return safetensors_file.read(path, tensor)


def _find_name(checkpoint: Checkpoint) -> str:
    found = set()
    for tensor in checkpoint.weight_map:
        module, _, part = tensor.rpartition(".")
        if part in _VALUES and module and not in_draft(module):
            found.add(module)
    for usual in _NAMES:
        names = sorted(
            module
            for module in found
            if module.rpartition(".")[2] == usual
            and not any(part.isdecimal() for part in module.split("."))
        )
        if len(names) > 1:
            raise LoadPlanError(
                f"{checkpoint.folder}: several heads, {names}, expected one; name it "
                "by --head-name"
            )
        if names:
            return names[0]
    tied = checkpoint.config.get("tie_word_embeddings")
    why = " (config.json ties it to the embedding)" if tied else ""
    raise LoadPlanError(
        f"{checkpoint.folder}: no output head{why}, expected a module called one of "
        f"{_NAMES}; name it by --head-name"
    )


def digest(tensor: torch.Tensor) -> str:
    """The SHA-256 of a tensor's dtype, shape and bytes."""
    found = hashlib.sha256(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    payload = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    found.update(payload.numpy().data)
    return found.hexdigest()
