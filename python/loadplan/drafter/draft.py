"""A draft's head and ids as files of a checkpoint, found by what they hold."""

from __future__ import annotations

import io
import json
import pickle
from pathlib import Path
from typing import Any

import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import files, safetensors_file
from loadplan.drafter.checkpoint import Checkpoint, is_backup, is_ids, may_be_rewritten

HEAD_FILE = "draft_head.safetensors"
"""Head and ids of the draft, in one file: what reads one has the other."""

TOKEN_MAP = "draft_ids.pt"
"""The ids alone, as SGLang's --speculative-token-map reads them: torch.save's I64."""

# No list of ids is larger; weights in these formats are, and are left unread.
_LARGEST = 64 << 20


def draft_files(checkpoint: Checkpoint) -> list[str]:
    """The files outside of the index that hold a draft's head or ids."""
    return [
        name
        for name in checkpoint.names
        if name not in checkpoint.headers
        and not is_backup(name)
        and _holds_draft(checkpoint.path(name))
    ]


def indexed_ids(checkpoint: Checkpoint) -> list[str]:
    """The names of ids among the tensors of the index."""
    return [
        tensor.name
        for header in checkpoint.headers.values()
        for tensor in header.tensors
        if is_ids(tensor)
    ]


def token_map(ids: torch.Tensor) -> bytes:
    """What torch.save writes for the ids."""
    buffer = io.BytesIO()
    torch.save(ids.clone(), buffer)
    return buffer.getvalue()


def read_token_map(path: Path) -> torch.Tensor | None:
    """The ids in a small file of torch.save, JSON or numpy; None if it holds others."""
    if path.stat().st_size > _LARGEST:
        return None
    try:
        found: Any = None
        if path.suffix == ".pt":
            found = torch.load(path, weights_only=True)
        elif path.suffix == ".json":
            found = json.loads(path.read_text(encoding="utf-8"))
        elif path.suffix == ".npy":
            import numpy

            found = torch.from_numpy(numpy.load(path, allow_pickle=False))
    except (
        ValueError,
        RuntimeError,
        OSError,
        EOFError,
        RecursionError,
        TypeError,
        pickle.UnpicklingError,
    ):
        return None
    if isinstance(found, list) and found and all(type(i) is int for i in found):
        found = torch.tensor(found)
    if not isinstance(found, torch.Tensor) or found.ndim != 1:
        return None
    return found if not found.is_floating_point() and found.numel() else None


def write(folder: Path, head: Path, ids: torch.Tensor) -> None:
    """Put a quantised draft head with its ids, and the ids alone, into ``folder``."""
    files.copy(head, folder / HEAD_FILE)
    files.write(folder / TOKEN_MAP, [token_map(ids)])


def _holds_draft(path: Path) -> bool:
    if path.suffix != ".safetensors":
        return read_token_map(path) is not None
    try:
        return may_be_rewritten(safetensors_file.read_header(path))
    except LoadPlanError:
        return False
