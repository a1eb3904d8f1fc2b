"""Tiny DeepSeek drafts that share a checkpoint with their target, without a GPU.

Real: the drafts with their whole module trees and their load_weights. Of the target
there are only some tensors in the checkpoint; no target is built.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional
from unittest.mock import patch

import torch
from tiny_deepseek_v41 import (
    BF16,
    F32,
    Specs,
    block_specs,
    draft_specs,
    linear,
    model_config_of,
    parameter_digests,
    tensor_bytes,
    tiny_config,
    tiny_model,
    write_shards,
)
from torch import nn
from transformers import DeepseekV3Config, PretrainedConfig

from loadplan.standin.gpu import Journal, fake_gpu
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.models import deepseek_v4
from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN
from sglang.srt.models.glm4_moe import GlmMoeDsaForCausalLMNextN

LAYERS = 3  # of the target, so that a NextN draft is its layer 3
UNSET_BYTE = 0xA5


class Draft(NamedTuple):
    """A draft's class and config, its own tensors, and those that it drops."""

    model_class: type[nn.Module]
    config: PretrainedConfig
    own: Specs
    dropped: Specs
    quantized: bool = True


def dspark() -> Draft:
    """Three times as many experts in the target as in the draft, as in 384 and 128."""
    config = tiny_config(engram_layer_ids=())
    config.n_routed_experts = 12
    config.dspark_n_routed_experts = 4
    stages = copy.copy(config)
    stages.n_routed_experts = config.dspark_n_routed_experts
    own = draft_specs(stages)
    # This draft has no confidence head.
    dropped = {name: own.pop(name) for name in [*own] if ".confidence_head." in name}
    dropped["mtp.0.ffn.gate.bias_vl"] = (F32, (4,))
    return Draft(DeepseekV4ForCausalLMDSpark, config, own, dropped)


def v4_nextn(*, stored: str = "mtp.0", layers: int = LAYERS) -> Draft:
    """Stored under ``mtp.0`` as released, or under the layer that it becomes."""
    c = tiny_config(engram_layer_ids=())
    c.model_type, c.num_hidden_layers = "deepseek_v4", layers
    c.num_nextn_predict_layers = 1
    hidden, scale = c.hidden_size, "scale" if stored == "mtp.0" else "weight_scale_inv"
    own = block_specs(c, stored)
    for part in ("e_proj", "h_proj"):
        projection = linear(f"{stored}.{part}", hidden, hidden)
        own[f"{stored}.{part}.weight"] = projection[f"{stored}.{part}.weight"]
        own[f"{stored}.{part}.{scale}"] = projection[f"{stored}.{part}.scale"]
    for part in ("enorm", "hnorm"):
        own[f"{stored}.{part}.weight"] = (BF16, (hidden,))
    norm = "norm" if stored == "mtp.0" else "shared_head.norm"
    own[f"{stored}.{norm}.weight"] = (BF16, (hidden,))
    own[f"{stored}.hc_head_fn"] = (F32, (c.hc_mult, c.hc_mult * hidden))
    own[f"{stored}.hc_head_base"] = (F32, (c.hc_mult,))
    own[f"{stored}.hc_head_scale"] = (F32, (1,))
    head, embedding = ("head", "emb.tok_emb")
    if stored != "mtp.0":
        head, embedding = ("shared_head.head", "embed_tokens")
    vocab = (BF16, (c.vocab_size, hidden))
    dropped = {f"{stored}.{part}.weight": vocab for part in (head, embedding)}
    return Draft(DeepseekV4ForCausalLMNextN, c, own, dropped)


def v3_nextn(
    *,
    model_class: type[nn.Module] = DeepseekV3ForCausalLMNextN,
    layers: int = LAYERS,
    stored: int = LAYERS,
) -> Draft:
    """Stored as the layer behind the target's last, or alone as layer 0."""
    c = DeepseekV3Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        # Plain RoPE is what the engine lacks on a CPU.
        rope_scaling={
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    )
    c.moe_layer_freq, c.num_nextn_predict_layers = 1, 1
    c.topk_method, c.scoring_func = "noaux_tc", "sigmoid"
    hidden, inter, heads = c.hidden_size, c.moe_intermediate_size, 4
    shapes = {
        "enorm": (hidden,),
        "hnorm": (hidden,),
        "eh_proj": (hidden, 2 * hidden),
        "shared_head.norm": (hidden,),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_a_proj": (c.q_lora_rank, hidden),
        "self_attn.q_a_layernorm": (c.q_lora_rank,),
        "self_attn.q_b_proj": (heads * 32, c.q_lora_rank),
        "self_attn.kv_a_proj_with_mqa": (c.kv_lora_rank + 16, hidden),
        "self_attn.kv_a_layernorm": (c.kv_lora_rank,),
        "self_attn.kv_b_proj": (heads * 32, c.kv_lora_rank),
        "self_attn.o_proj": (hidden, heads * 16),
        "mlp.gate": (c.n_routed_experts, hidden),
    }
    for expert in ("shared_experts", *(f"experts.{i}" for i in range(4))):
        shapes[f"mlp.{expert}.gate_proj"] = (inter, hidden)
        shapes[f"mlp.{expert}.up_proj"] = (inter, hidden)
        shapes[f"mlp.{expert}.down_proj"] = (hidden, inter)
    layer = f"model.layers.{stored}"
    own = {f"{layer}.{part}.weight": (BF16, shape) for part, shape in shapes.items()}
    own[f"{layer}.mlp.gate.e_score_correction_bias"] = (F32, (c.n_routed_experts,))
    vocab = (BF16, (c.vocab_size, hidden))
    parts = ("shared_head.head", "embed_tokens")
    dropped = {f"{layer}.{part}.weight": vocab for part in parts}
    return Draft(model_class, c, own, dropped, quantized=False)


DRAFTS = {
    "DSpark": dspark,
    "V4 NextN": v4_nextn,
    "V4 NextN as layers.N": lambda: v4_nextn(stored=f"model.layers.{LAYERS}"),
    "V4 NextN alone": lambda: v4_nextn(stored="model.layers.0", layers=1),
    "V4 NextN as layers.7": lambda: v4_nextn(stored="model.layers.7"),
    "V3 NextN": v3_nextn,
    "V3 NextN alone": lambda: v3_nextn(layers=1, stored=0),
    "GLM DSA NextN": lambda: v3_nextn(model_class=GlmMoeDsaForCausalLMNextN),
}


def target_specs() -> Specs:
    """What the target adds: much more than the draft, under names of either release."""
    big, vocab = (BF16, (1024, 1024)), (BF16, (256, 64))
    return {
        "embed.weight": vocab,
        "head.weight": vocab,
        "model.embed_tokens.weight": vocab,
        "lm_head.weight": vocab,
        "layers.2.ffn.experts.0.w1.weight": big,
        "model.layers.2.mlp.experts.0.up_proj.weight": big,
    }


def shared_checkpoint(folder: str, draft: Draft, layout: str) -> dict[str, bytes]:
    """Write target and draft in one folder; return the bytes of the draft's tensors."""
    target = target_specs() | draft.dropped
    shards: dict[str, Specs] = {"target": target, "zdraft": draft.own}
    if layout == "mixed":
        # Each shard holds a part of both.
        names = sorted(target | draft.own)
        both = target | draft.own
        shards = {f"{i}": {n: both[n] for n in names[i::2]} for i in range(2)}
    unindexed = ("zdraft",) if layout == "unindexed" else ()
    content = write_shards(folder, shards, unindexed=unindexed)
    return {name: content[name] for name in draft.own}


@contextmanager
def counted_reads() -> Iterator[list[tuple[str, int]]]:
    """Note path and bytes of every positioned read; none without the patches."""
    reads: list[tuple[str, int]] = []
    try:
        from sglang.srt.model_loader.loadplan.read import OpenFile
    except ImportError:
        yield reads
        return
    read_into = OpenFile.read_into

    def counting(self: Any, buffer: memoryview, offset: int) -> None:
        read_into(self, buffer, offset)
        reads.append((self.path, len(buffer)))

    with patch.object(OpenFile, "read_into", counting):
        yield reads


def bytes_read(journal: Journal, reads: list[tuple[str, int]]) -> int:
    """Payload bytes of positioned reads and of files that were streamed whole."""
    streamed = [path for call in journal.calls for path in call.files]
    whole = sum(os.path.getsize(path) - header_bytes(path) for path in streamed)
    return whole + sum(nbytes for _, nbytes in reads)


def opened_files(journal: Journal, reads: list[tuple[str, int]]) -> list[str]:
    """The files of which more than the header was read."""
    streamed = [path for call in journal.calls for path in call.files]
    return sorted({*streamed, *(path for path, _ in reads)})


def header_bytes(path: str) -> int:
    with open(path, "rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")


@contextmanager
def changed_rule(change: Optional[str]) -> Iterator[None]:
    """Replace a part of the rule by which wanted_weight and load_weights decide."""
    if change is None:
        yield
        return
    from sglang.srt.models.deepseek_common import deepseek_weight_loader, draft_names

    with ExitStack() as stack:
        for module, name, value in {
            "keep nothing": [
                (draft_names, "is_nextn_weight", lambda *names: False),
                (deepseek_weight_loader, "is_nextn_weight", lambda *names: False),
            ],
            "layer 7": [(draft_names, "nextn_layer_id", lambda config: 7)],
            "NPU": [(draft_names, "_is_npu", True)],
        }[change]:
            stack.enter_context(patch.object(module, name, value))
        yield


def build(draft: Draft) -> nn.Module:
    """The draft's module tree; every byte of its parameters is ``UNSET_BYTE``."""
    rope = nullcontext()
    if draft.model_class is DeepseekV4ForCausalLMNextN:
        # RoPE has no weights, and this one is plain, which the engine lacks here.
        rope = patch.object(
            deepseek_v4, "get_rope_wrapper", lambda *args, **kwargs: nn.Identity()
        )
    with rope:
        model = tiny_model(draft.config, draft.model_class, quantized=draft.quantized)
    for parameter in model.parameters():
        parameter.data.view(-1).view(torch.uint8).fill_(UNSET_BYTE)
    return model


def load_drafts(
    rank: int, tp_size: int, cases: Sequence[tuple[str, str, str, Optional[str]]]
) -> list[SimpleNamespace]:
    """Load one rank's drafts by the engine's own loader. A target of ``run_ranks``.

    A case is a folder, one of ``DRAFTS``, a load format and a change for
    ``changed_rule``.
    """
    return [_load_draft(*case) for case in cases]


def _load_draft(
    folder: str, kind: str, load_format: str, change: Optional[str]
) -> SimpleNamespace:
    model = build(DRAFTS[kind]())
    names: list[str] = []
    engine = DefaultModelLoader(LoadConfig(load_format=load_format))

    def noted(weights: Any) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            names.append(name)
            yield name, tensor

    with changed_rule(change), fake_gpu() as journal, counted_reads() as reads:
        weights = noted(engine._get_all_weights(model_config_of(folder), model))
        engine.load_weights_only(model, weights, torch.device("cpu"))
        nbytes = bytes_read(journal, reads)
    return SimpleNamespace(
        names=sorted(names),
        nbytes=nbytes,
        opened=opened_files(journal, reads),
        digests=parameter_digests(model),
        unset={
            name
            for name, parameter in model.named_parameters()
            if set(tensor_bytes(parameter)) == {UNSET_BYTE}
        },
    )
