"""Make variants of the tiny checkpoints, and damage them."""

from __future__ import annotations

from pathlib import Path

import torch
from drafter_heads import Heads
from safetensors.torch import load_file, save_file

from loadplan.drafter import safetensors_file, variant, verify


def make(
    source: Path, out: Path, heads: Heads, *, kind: str = "int4", draft: bool = True
) -> list[verify.Result]:
    """The variant ``out`` with the head of a kind, and the draft's."""
    plan = variant.make_plan(
        source,
        out,
        getattr(heads, kind),
        draft_head=heads.draft if draft else None,
    )
    return variant.build(plan, out)


def change(path: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Replace a tensor of a file, or take it away, and keep all else."""
    held, metadata = safetensors_file.read_all(path)
    del held[name]
    if tensor is not None:
        held[name] = tensor
    pieces = [safetensors_file.tensor_piece(*item) for item in held.items()]
    safetensors_file.write(path, pieces, metadata=metadata)


def add(path: Path, name: str, tensor: torch.Tensor) -> None:
    held = load_file(path) if path.exists() else {}
    save_file(held | {name: tensor}, path)
