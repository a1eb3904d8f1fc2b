"""The tensors of a synthetic model, by the names and dtypes of DeepSeek-V4.1-Flash."""

from __future__ import annotations

from collections.abc import Iterator

from loadplan.synth.model import STAGES, SynthModel, Tensor
from loadplan.synth.scale import BLOCK, ENGRAM_DIM, HYPER_STREAMS, Scale

_MIX = (2 + HYPER_STREAMS) * HYPER_STREAMS  # rows of hc_*_fn


def dense_tensors(model: SynthModel) -> Iterator[Tensor]:
    """Every tensor outside the Engram tables, in the order of the model's layers."""
    scale = model.scale
    tables = {table.layer_id for table in model.tables}
    yield "embed.weight", "BF16", (scale.vocab, scale.hidden)
    for layer in range(scale.layers):
        prefix = f"layers.{layer}"
        yield from _block(prefix, scale, experts=model.experts)
        if layer in scale.compressors:
            yield from _compressor(
                f"{prefix}.attn", scale, ratio=scale.compress_ratios[layer]
            )
        if layer in tables:
            yield from _engram(f"{prefix}.engram", scale)
    yield "norm.weight", "BF16", (scale.hidden,)
    yield "head.weight", "BF16", (scale.vocab, scale.hidden)
    if model.draft:
        yield from _draft(model)


def _fp8(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.scale", "F8_E8M0", (rows // BLOCK, columns // BLOCK)


def _fp4(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    # Two values share a byte. I8 is the dtype of SGLang's packed expert parameters.
    yield f"{name}.weight", "I8", (rows, columns // 2)
    yield f"{name}.scale", "F8_E8M0", (rows, columns // BLOCK)


def _block(prefix: str, scale: Scale, *, experts: int) -> Iterator[Tensor]:
    """A decoder layer or draft stage: attention, norms, hyper-connections, experts."""
    hidden, attn, ffn = scale.hidden, f"{prefix}.attn", f"{prefix}.ffn"
    all_heads = scale.heads * scale.head_dim
    yield from _fp8(f"{attn}.wq_a", scale.q_rank, hidden)
    yield f"{attn}.q_norm.weight", "BF16", (scale.q_rank,)
    yield from _fp8(f"{attn}.wq_b", all_heads, scale.q_rank)
    yield from _fp8(f"{attn}.wkv", scale.head_dim, hidden)
    yield f"{attn}.kv_norm.weight", "BF16", (scale.head_dim,)
    grouped = scale.o_groups * scale.o_rank
    yield from _fp8(f"{attn}.wo_a", grouped, all_heads // scale.o_groups)
    yield from _fp8(f"{attn}.wo_b", hidden, grouped)
    yield f"{attn}.attn_sink", "F32", (scale.heads,)
    yield f"{prefix}.attn_norm.weight", "BF16", (hidden,)
    yield f"{prefix}.ffn_norm.weight", "BF16", (hidden,)
    for part in ("attn", "ffn"):
        yield f"{prefix}.hc_{part}_fn", "F32", (_MIX, HYPER_STREAMS * hidden)
        yield f"{prefix}.hc_{part}_base", "F32", (_MIX,)
        yield f"{prefix}.hc_{part}_scale", "F32", (3,)
    yield f"{ffn}.gate.weight", "BF16", (experts, hidden)
    yield f"{ffn}.gate.bias", "F32", (experts,)
    yield f"{ffn}.gate.bias_vl", "F32", (experts,)
    for kind, names in (
        (_fp8, [f"{ffn}.shared_experts"]),
        (_fp4, [f"{ffn}.experts.{expert}" for expert in range(experts)]),
    ):
        for name in names:
            yield from kind(f"{name}.w1", scale.moe_hidden, hidden)
            yield from kind(f"{name}.w2", hidden, scale.moe_hidden)
            yield from kind(f"{name}.w3", scale.moe_hidden, hidden)


def _compressor(attn: str, scale: Scale, *, ratio: int) -> Iterator[Tensor]:
    """What a layer owns whose compressed KV the layers after it read as well."""
    hidden, head_dim = scale.hidden, scale.head_dim
    yield f"{attn}.compressor.wkv.weight", "BF16", (head_dim, hidden)
    if ratio > 1:
        yield f"{attn}.compressor.wgate.weight", "BF16", (head_dim, hidden)
    yield f"{attn}.compressor.norm.weight", "BF16", (head_dim,)
    index = f"{attn}.indexer"
    yield from _fp8(f"{index}.wq_b", scale.index_heads * scale.index_dim, scale.q_rank)
    yield f"{index}.weights_proj.weight", "BF16", (scale.index_heads, hidden)
    yield f"{index}.wk.weight", "BF16", (scale.index_dim, head_dim)
    yield f"{index}.k_norm.weight", "BF16", (scale.index_dim,)


def _engram(prefix: str, scale: Scale) -> Iterator[Tensor]:
    """An Engram's own weights, beside its table."""
    keys_and_value = (HYPER_STREAMS + 1) * scale.hidden
    yield from _fp8(f"{prefix}.wkv", keys_and_value, scale.hash_columns * ENGRAM_DIM)
    yield f"{prefix}.q_weight", "BF16", (HYPER_STREAMS, scale.hidden)
    yield f"{prefix}.k_weight", "BF16", (HYPER_STREAMS, scale.hidden)


def _draft(model: SynthModel) -> Iterator[Tensor]:
    """The DSpark draft: stages, the first one's input, the last one's heads."""
    scale = model.scale
    hidden, rank = scale.hidden, scale.markov_rank
    for stage in range(STAGES):
        yield from _block(f"mtp.{stage}", scale, experts=model.draft_experts)
    yield from _fp8("mtp.0.main_proj", hidden, STAGES * hidden)
    yield "mtp.0.main_norm.weight", "BF16", (hidden,)
    last = f"mtp.{STAGES - 1}"
    yield f"{last}.norm.weight", "BF16", (hidden,)
    yield f"{last}.markov_head.embed.weight", "BF16", (scale.vocab, rank)
    yield f"{last}.markov_head.head.weight", "BF16", (scale.vocab, rank)
    yield f"{last}.confidence_head.proj.weight", "F32", (1, hidden + rank)
