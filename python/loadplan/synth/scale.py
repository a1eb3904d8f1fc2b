"""How wide a synthetic model is: one scale for each class of sizes.

Ranks and block sizes are those of DeepSeek-V4.1-Flash; widths, layers and experts
shrink with the bytes that are asked for.
"""

from __future__ import annotations

from dataclasses import dataclass

ENGRAM_DIM = 256  # FP8 values in one table row
BLOCK = 32  # values that share one F8_E8M0 scale, along each blocked dimension
ENGRAM_ROW_BYTES = ENGRAM_DIM + ENGRAM_DIM // BLOCK
HYPER_STREAMS = 4  # hc_mult: copies of the residual stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Widths of one size class; the last one stands for the published model."""

    layers: int
    hidden: int
    moe_hidden: int
    heads: int
    head_dim: int
    q_rank: int
    o_groups: int
    o_rank: int
    index_heads: int
    index_dim: int
    vocab: int
    ngrams: int  # hashed n-gram sizes per Engram: 2, 3, ... tokens
    hash_heads: int

    @property
    def hash_columns(self) -> int:
        return self.ngrams * self.hash_heads

    @property
    def markov_rank(self) -> int:
        return min(256, self.hidden // 4)

    @property
    def expert_bytes(self) -> int:
        values = 3 * self.hidden * self.moe_hidden
        return values // 2 + values // BLOCK

    @property
    def compress_ratios(self) -> list[int]:
        """Each layer's KV compression ratio."""
        half = self.layers // 2
        return [0] + [2] * half + [1] * (self.layers - half - 1)

    @property
    def compressors(self) -> list[int]:
        """The layers that own a compressor."""
        return [1, self.layers // 2 + 1]


# fmt: off
SCALES = (
    Scale(layers=4, hidden=128, moe_hidden=128, heads=4, head_dim=128, q_rank=128,
          o_groups=4, o_rank=32, index_heads=4, index_dim=64, vocab=1024, ngrams=2,
          hash_heads=2),
    Scale(layers=4, hidden=256, moe_hidden=256, heads=8, head_dim=128, q_rank=128,
          o_groups=4, o_rank=64, index_heads=4, index_dim=64, vocab=2048, ngrams=2,
          hash_heads=4),
    Scale(layers=6, hidden=512, moe_hidden=512, heads=8, head_dim=256, q_rank=128,
          o_groups=4, o_rank=128, index_heads=8, index_dim=128, vocab=8192, ngrams=2,
          hash_heads=4),
    Scale(layers=16, hidden=1024, moe_hidden=768, heads=16, head_dim=256, q_rank=256,
          o_groups=8, o_rank=256, index_heads=16, index_dim=128, vocab=32768, ngrams=2,
          hash_heads=8),
    Scale(layers=24, hidden=2048, moe_hidden=1024, heads=32, head_dim=512, q_rank=512,
          o_groups=8, o_rank=512, index_heads=32, index_dim=128, vocab=65536, ngrams=3,
          hash_heads=8),
    Scale(layers=43, hidden=5120, moe_hidden=2048, heads=64, head_dim=512, q_rank=1280,
          o_groups=8, o_rank=1024, index_heads=32, index_dim=128, vocab=129280,
          ngrams=3, hash_heads=8),
)
# fmt: on
