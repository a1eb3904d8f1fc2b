"""The model that a synthetic checkpoint pretends to hold: a scaled DeepSeek-V4.1.

Names, dtypes, ranks and block sizes are those of DeepSeek-V4.1-Flash; widths, layers
and experts shrink with the bytes that are asked for. The vision tower is left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from loadplan.core.header import LoadPlanError

# One tensor as a checkpoint names it: name, safetensors dtype, shape in elements.
Tensor = tuple[str, str, tuple[int, ...]]

ENGRAM_DIM = 256  # FP8 values in one table row
BLOCK = 32  # values that share one F8_E8M0 scale, along each blocked dimension
ENGRAM_ROW_BYTES = ENGRAM_DIM + ENGRAM_DIM // BLOCK

_HYPER_STREAMS = 4  # hc_mult: copies of the residual stream
_MIX = (2 + _HYPER_STREAMS) * _HYPER_STREAMS  # rows of hc_*_fn
_STAGES = 3  # DSpark stages, mtp.0 to mtp.2
_EXPERT_STEP = 4  # experts divide evenly over expert-parallel sizes 1, 2 and 4
_MIN_EXPERTS = 8
# A wider scale is taken only once it can have this many experts per layer: below,
# one expert more or less is too large a step towards the size that was asked for.
_FULL_EXPERTS = 32
_SIZE_TOLERANCE = 0.15

_ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E8M0": 1, "F8_E4M3": 1, "I8": 1}


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


# fmt: off
_SCALES = (
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
        return _EXPERT_STEP * math.ceil(self.experts / (3 * _EXPERT_STEP))


def fit_model(size: int, *, engram_fraction: float, draft: bool) -> SynthModel:
    """Return the model whose tensors come to about ``size`` bytes.

    Raises:
        LoadPlanError: no model of this shape comes within 15 % of ``size``.
    """
    rows = int(size * engram_fraction) // (2 * ENGRAM_ROW_BYTES)
    for scale in reversed(_SCALES):
        vocab, tables = _fit_tables(scale, rows=rows)
        table_bytes = sum(table.rows * ENGRAM_ROW_BYTES for table in tables)
        experts = _fit_experts(scale, size=size - table_bytes, draft=draft)
        if experts >= _FULL_EXPERTS:
            break
    model = SynthModel(
        scale=scale,
        experts=max(experts, _MIN_EXPERTS),
        draft=draft,
        engram_vocab=vocab,
        tables=tables,
    )
    total = table_bytes + sum(map(tensor_bytes, dense_tensors(model)))
    if abs(total - size) > _SIZE_TOLERANCE * size:
        raise LoadPlanError(
            f"size: got {size} bytes with engram_fraction {engram_fraction!r}, for "
            f"which the nearest model has {total} bytes, expected a difference of at "
            f"most {_SIZE_TOLERANCE:.0%}; ask for a larger size, another fraction or "
            "no draft"
        )
    return model


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of one tensor's data."""
    _, dtype, shape = tensor
    return math.prod(shape) * _ITEM_BYTES[dtype]


def dense_tensors(model: SynthModel) -> Iterator[Tensor]:
    """Every tensor outside the Engram tables, in the order of the model's layers."""
    scale = model.scale
    tables = {table.layer_id for table in model.tables}
    ratios, sources = _compression(scale)
    yield "embed.weight", "BF16", (scale.vocab, scale.hidden)
    for layer in range(scale.layers):
        prefix = f"layers.{layer}"
        yield from _block(prefix, scale, experts=model.experts)
        if layer in sources:
            yield from _compressor(f"{prefix}.attn", scale, ratio=ratios[layer])
        if layer in tables:
            yield from _engram(f"{prefix}.engram", scale)
    yield "norm.weight", "BF16", (scale.hidden,)
    yield "head.weight", "BF16", (scale.vocab, scale.hidden)
    if model.draft:
        yield from _draft(model)


def config(model: SynthModel) -> dict[str, object]:
    """The ``config.json`` that the engine's DeepSeek-V4.1 configuration reads."""
    scale = model.scale
    ratios, sources = _compression(scale)
    values: dict[str, object] = {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "torch_dtype": "bfloat16",
        "vocab_size": scale.vocab,
        "num_hidden_layers": scale.layers,
        "hidden_size": scale.hidden,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 65536,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 4096,
        },
        "num_attention_heads": scale.heads,
        "num_key_value_heads": 1,
        "head_dim": scale.head_dim,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": scale.head_dim - 64,
        "v_head_dim": scale.head_dim,
        "kv_lora_rank": scale.head_dim,
        "q_lora_rank": scale.q_rank,
        "o_lora_rank": scale.o_rank,
        "o_groups": scale.o_groups,
        "sliding_window": 128,
        "compress_ratios": ratios,
        "kv_source_layer_ids": sources,
        "index_source_layer_ids": sources,
        "index_n_heads": scale.index_heads,
        "index_head_dim": scale.index_dim,
        "index_topk": 512,
        "moe_intermediate_size": scale.moe_hidden,
        "n_routed_experts": model.experts,
        "num_experts_per_tok": 6,
        "first_k_dense_replace": 0,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "routed_scaling_factor": 1.5,
        "hc_mult": _HYPER_STREAMS,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "hc_pre_from_prev_sublayer": True,
        "q_head_norm": False,
        "vision_n_layers": 0,
        "engram_layer_ids": [table.layer_id for table in model.tables],
        "engram_num_embeddings": [table.rows for table in model.tables],
        "engram_max_ngram_size": scale.ngrams + 1,
        "engram_n_heads": scale.hash_heads,
        "engram_head_dim": ENGRAM_DIM,
        "engram_vocab_size": model.engram_vocab,
        "engram_compressed_vocab_size": scale.vocab,
        "engram_pad_token_id": 2,
        "quantization_config": {
            "quant_method": "fp8",
            "fmt": "e4m3",
            "activation_scheme": "dynamic",
            "scale_fmt": "ue8m0",
            "weight_block_size": [BLOCK, BLOCK],
        },
    }
    if model.draft:  # any dspark_* key tells the engine that a draft is bundled
        values |= {
            "dspark_block_size": 7,
            "dspark_markov_rank": scale.markov_rank,
            "dspark_noise_token_id": 2,
            "dspark_target_layer_ids": list(
                range(scale.layers - _STAGES, scale.layers)
            ),
            "dspark_n_routed_experts": model.draft_experts,
            "dspark_num_experts_per_tok": 4,
            "num_nextn_predict_layers": _STAGES,
        }
    return values


def draw_primes(start: int, count: int) -> list[int]:
    """Return the ``count`` smallest primes that are at least ``start``, ascending."""
    primes: list[int] = []
    candidate = max(start, 2)
    while len(primes) < count:
        divisors = range(2, math.isqrt(candidate) + 1)
        if all(candidate % divisor for divisor in divisors):
            primes.append(candidate)
        candidate += 1
    return primes


def _fit_tables(
    scale: Scale, *, rows: int
) -> tuple[int, tuple[EngramTable, EngramTable]]:
    """Tables of about ``rows`` rows each, and the hash vocabulary they follow from."""
    columns = scale.hash_columns
    per_column = rows / columns
    # Primes lie about log(p) apart, and the two layers draw 2 * columns of them.
    vocab = max(2, int(per_column - columns * math.log(max(per_column, 2))))
    # The engine draws a layer's columns, then the next layer's, from one sequence.
    primes = draw_primes(vocab, 2 * columns)
    layer_ids = (1, 14) if scale.layers > 14 else (1, 2)
    return vocab, (
        _table(layer_ids[0], primes[:columns]),
        _table(layer_ids[1], primes[columns:]),
    )


def _table(layer_id: int, primes: list[int]) -> EngramTable:
    bounds = [0]
    for prime in primes:
        bounds.append(bounds[-1] + prime)
    return EngramTable(
        layer_id=layer_id, rows=bounds[-1], dim=ENGRAM_DIM, column_bounds=tuple(bounds)
    )


def _fit_experts(scale: Scale, *, size: int, draft: bool) -> int:
    """Routed experts per layer that bring the dense tensors near ``size`` bytes."""
    _, tables = _fit_tables(scale, rows=0)
    bare = SynthModel(
        scale=scale, experts=0, draft=draft, engram_vocab=0, tables=tables
    )
    fixed = sum(map(tensor_bytes, dense_tensors(bare)))
    blocks = scale.layers + (_STAGES / 3 if draft else 0)
    wanted = (size - fixed) / (blocks * (scale.expert_bytes + 2 * scale.hidden))
    return _EXPERT_STEP * round(wanted / _EXPERT_STEP)


def _compression(scale: Scale) -> tuple[list[int], list[int]]:
    """Each layer's KV compression ratio, and the layers that own a compressor."""
    half = scale.layers // 2
    ratios = [0] + [2] * half + [1] * (scale.layers - half - 1)
    return ratios, [1, half + 1]


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
        yield f"{prefix}.hc_{part}_fn", "F32", (_MIX, _HYPER_STREAMS * hidden)
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
    keys_and_value = (_HYPER_STREAMS + 1) * scale.hidden
    yield from _fp8(f"{prefix}.wkv", keys_and_value, scale.hash_columns * ENGRAM_DIM)
    yield f"{prefix}.q_weight", "BF16", (_HYPER_STREAMS, scale.hidden)
    yield f"{prefix}.k_weight", "BF16", (_HYPER_STREAMS, scale.hidden)


def _draft(model: SynthModel) -> Iterator[Tensor]:
    """The DSpark draft: stages, the first one's input, the last one's heads."""
    scale = model.scale
    hidden, rank = scale.hidden, scale.markov_rank
    for stage in range(_STAGES):
        yield from _block(f"mtp.{stage}", scale, experts=model.draft_experts)
    yield from _fp8("mtp.0.main_proj", hidden, _STAGES * hidden)
    yield "mtp.0.main_norm.weight", "BF16", (hidden,)
    last = f"mtp.{_STAGES - 1}"
    yield f"{last}.norm.weight", "BF16", (hidden,)
    yield f"{last}.markov_head.embed.weight", "BF16", (scale.vocab, rank)
    yield f"{last}.markov_head.head.weight", "BF16", (scale.vocab, rank)
    yield f"{last}.confidence_head.proj.weight", "F32", (1, hidden + rank)
