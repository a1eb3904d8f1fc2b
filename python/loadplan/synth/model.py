"""The model that a synthetic checkpoint pretends to hold: a scaled DeepSeek-V4.1.

The vision tower is left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from loadplan.synth.scale import BLOCK, Scale

# One tensor as a checkpoint names it: name, safetensors dtype, shape in elements.
Tensor = tuple[str, str, tuple[int, ...]]

EXPERT_STEP = 4  # experts divide evenly over expert-parallel sizes 1, 2 and 4
STAGES = 3  # DSpark stages, mtp.0 to mtp.2

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E8M0": 1, "F8_E4M3": 1, "I8": 1}


@dataclass(frozen=True, slots=True, kw_only=True)
class EngramTable:
    """One layer's hash table: ``rows`` of ``dim`` FP8 values, plus their scales.

    Hash column ``c`` owns the rows ``[column_bounds[c], column_bounds[c + 1])``, so
    the last bound equals ``rows``.
    """

    layer_id: int
    rows: int
    dim: int
    column_bounds: tuple[int, ...]

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """The two tensors that a placement may keep on the host."""
        prefix = f"layers.{self.layer_id}.engram.embed"
        scales = (self.rows, self.dim // BLOCK)
        return (
            (f"{prefix}.weight", "F8_E4M3", (self.rows, self.dim)),
            (f"{prefix}.scale", "F8_E8M0", scales),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SynthModel:
    """A scale with its expert count and its tables; ``draft`` adds ``mtp.*``."""

    scale: Scale
    experts: int
    draft: bool
    engram_vocab: int
    tables: tuple[EngramTable, EngramTable]

    @property
    def draft_experts(self) -> int:
        """A third of the target's, as 128 of 384 in the published model."""
        return EXPERT_STEP * math.ceil(self.experts / (3 * EXPERT_STEP))


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of one tensor's data."""
    _, dtype, shape = tensor
    return math.prod(shape) * _ITEM_BYTES[dtype]
