"""Quantised heads without GPTQ, and where GPTQ's environment is."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import drafter_checkpoint as tiny
import torch

from loadplan.drafter import head, packing, quantize
from loadplan.drafter.scheme import Scheme

ROOT = Path(__file__).parents[3]
ENVIRONMENT = ROOT / ".venv-llmcompressor"
IDS = torch.tensor(sorted([*range(40, 120), *range(250, 260)]))


@dataclasses.dataclass(frozen=True)
class Heads:
    """Files as 'quantize' writes them, of the tiny checkpoints."""

    int4: Path
    asymmetric: Path
    nvfp4: Path
    draft: Path


def write_heads(folder: Path) -> Heads:
    int4 = Scheme("int4", 32, True)
    files = Heads(
        *(folder / f"{name}.st" for name in ("int4", "asym", "nvfp4", "draft"))
    )
    write_head(files.int4, int4)
    write_head(files.asymmetric, Scheme("int4", 64, False))
    write_head(files.nvfp4, Scheme("nvfp4", 16, True))
    write_head(files.draft, int4, ids=IDS)
    return files


def write_head(
    path: Path, scheme: Scheme, *, ids: torch.Tensor | None = None, seed: int = 0
) -> None:
    """Round the head of the tiny checkpoint of ``seed`` and write its file."""
    whole = tiny.tensors(seed)["lm_head.weight"]
    weight = whole if ids is None else whole[ids]
    scales = packing.find_scales(weight, scheme)
    packed = packing.pack(weight, scales, scheme, dtype=weight.dtype)
    about = {
        "head": "lm_head",
        "kind": scheme.kind,
        "group_size": scheme.group_size,
        "symmetric": scheme.symmetric,
        "rows": weight.shape[0],
        "width": weight.shape[1],
        "source_sha256": head.digest(whole),
    }
    quantize._write(path, packed, ids, about)


def why_no_llmcompressor() -> str:
    """Why GPTQ's environment is not there, "" if it is."""
    pins = (ROOT / "requirements-llmcompressor.txt").read_bytes()
    stamp = f".stamp-{hashlib.sha256(pins).hexdigest()[:16]}"
    if (ENVIRONMENT / stamp).is_file():
        return ""
    log = ENVIRONMENT / "failed.log"
    if not log.is_file():
        return "no .venv-llmcompressor: run make setup"
    return f"llmcompressor could not be installed: {log.read_text()[-500:]}"
