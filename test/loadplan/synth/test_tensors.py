"""Names, shapes and configuration; SGLang's own model is the judge."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from synthetic import PUBLISHED_SIZE, SMALL, tensors_of

from loadplan.core.header import TensorHeader
from loadplan.synth.config import config as synth_config
from loadplan.synth.fit import fit_model
from loadplan.synth.layout import engram_tables
from loadplan.synth.options import SynthOptions


def test_published_names_are_present_with_their_dtypes() -> None:
    """Red if a name of the published checkpoint is spelled or stored otherwise."""
    dtypes = {name: tensor.dtype for name, tensor in tensors_of(SMALL).items()}
    expected = {
        "embed.weight": "BF16",
        "head.weight": "BF16",
        "norm.weight": "BF16",
        "layers.0.attn.wq_a.weight": "F8_E4M3",
        "layers.0.attn.wq_a.scale": "F8_E8M0",
        "layers.0.attn_norm.weight": "BF16",
        "layers.0.hc_attn_fn": "F32",
        "layers.0.ffn.gate.weight": "BF16",
        "layers.0.ffn.gate.bias": "F32",
        "layers.0.ffn.shared_experts.w2.weight": "F8_E4M3",
        "layers.1.engram.embed.weight": "F8_E4M3",
        "layers.1.engram.embed.scale": "F8_E8M0",
        "layers.1.engram.wkv.weight": "F8_E4M3",
        "layers.1.engram.q_weight": "BF16",
        "layers.2.ffn.experts.7.w1.weight": "I8",
        "layers.2.ffn.experts.7.w1.scale": "F8_E8M0",
        "mtp.0.attn.wq_a.weight": "F8_E4M3",
        "mtp.0.main_proj.weight": "F8_E4M3",
        "mtp.2.markov_head.embed.weight": "BF16",
    }
    assert {name: dtypes.get(name) for name in expected} == expected


def test_without_draft_neither_tensors_nor_config_mention_it() -> None:
    """Red if a draft's tensor or a dspark key stays: the engine would look for one."""
    options = SynthOptions(draft=False)
    assert not [name for name in tensors_of(options) if name.startswith("mtp.")]
    model = fit_model(options.size, engram_fraction=0.4, draft=False)
    assert not [key for key in synth_config(model) if "dspark" in key]


def sglang_parameter(name: str) -> str:
    """The parameter that SGLang stacks a tensor of this (mapped) name into."""
    expert = re.fullmatch(r"(.*\.mlp\.experts)\.\d+\.(\w+)_proj\.(.*)", name)
    if expert:
        prefix, projection, field = expert.groups()
        return f"{prefix}.{'w2' if projection == 'down' else 'w13'}_{field}"
    name = re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name)
    name = re.sub(r"\.self_attn\.(wq_a|wkv)\.", ".self_attn.wqkv_a.", name)
    return re.sub(r"\.compressor\.(wkv|wgate)\.", ".compressor.wkv_gate.", name)


def assert_fills(
    module: torch.nn.Module, mapped: Iterable[tuple[str, TensorHeader]]
) -> None:
    """Each parameter is filled exactly, by tensors of its own row length."""
    shapes = {
        name: tuple(parameter.shape)
        for name, parameter in module.named_parameters()
        if not name.endswith(("k_scale", "v_scale"))  # of the KV cache
    }
    filled: Counter[str] = Counter()
    for name, spec in mapped:
        whole = name if name in shapes else sglang_parameter(name)
        assert shapes[whole][-1:] == spec.shape[-1:], name
        filled[whole] += math.prod(spec.shape)
    assert filled == {name: math.prod(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("options", [SMALL, SynthOptions(size=PUBLISHED_SIZE)])
def test_sglang_config_tables_and_module_tree_accept_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: SynthOptions
) -> None:
    """Red if a name, shape or config key is not what SGLang's own classes expect."""
    pytest.importorskip("sglang", reason="needs an SGLang tree on PYTHONPATH")
    from sglang.srt.layers.engram import EngramLayout, shard_range
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.models import deepseek_v4
    from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
    from sglang.srt.runtime_context import get_context, get_parallel
    from sglang.srt.speculative.dspark_components import dspark_config
    from sglang.srt.utils.hf_transformers_utils import get_config

    model = fit_model(options.size, engram_fraction=0.4, draft=True)
    (tmp_path / "config.json").write_text(json.dumps(synth_config(model)))
    config = get_config(str(tmp_path), trust_remote_code=False)
    assert config.architectures == ["DeepseekV4ForCausalLM"]
    assert dspark_config.checkpoint_bundles_dspark_draft(config)

    layout = EngramLayout.from_config(config)
    for position, table in enumerate(engram_tables(options)):
        assert layout.layer_ids[position] == table.layer_id
        assert layout.num_embeddings[position] == table.rows
        assert layout.head_dim == table.dim
        assert layout.column_bounds(position) == table.column_bounds
        for tp_size in (1, 2, 3, 4):
            ends = [0]
            for rank in range(tp_size):
                start, end = shard_range(table.rows, table.column_bounds, rank, tp_size)
                assert start == ends[-1]
                ends.append(end)
            assert ends[-1] == table.rows

    # Neither the hasher (it reads a tokenizer) nor the rotary cache holds weights.
    monkeypatch.setattr(deepseek_v4.EngramHasher, "from_config", lambda *a, **k: None)
    monkeypatch.setattr(deepseek_v4, "get_rope_wrapper", lambda **kwargs: None)
    quantization = Fp8Config.from_config(config.quantization_config)
    quantization.is_fp4_experts = True
    ranks = ("tp", "pp", "attn_tp", "attn_dp", "attn_cp", "moe_ep", "moe_tp", "moe_dp")
    one = SimpleNamespace(
        world_size=1, rank_in_group=0, is_first_rank=True, is_last_rank=True
    )
    with (
        get_context().override_server_args(device="cpu"),
        get_parallel().override(
            pp_group=one, tp_group=one, **{f"{name}_rank": 0 for name in ranks}
        ),
        torch.device("meta"),
    ):
        target = deepseek_v4.DeepseekV4ForCausalLM(config, quantization)
        draft = DeepseekV4ForCausalLMDSpark(config, quantization)
    draft.confidence_head = torch.nn.Module()
    draft.confidence_head.proj = torch.nn.Linear(
        config.hidden_size + config.dspark_markov_rank, 1, bias=False, device="meta"
    )

    for_target, for_draft = [], []
    for spec in tensors_of(options).values():
        # wo_a's scales are folded into its weight; the vision bias has no module.
        if spec.name.endswith((".wo_a.scale", ".gate.bias_vl")):
            continue
        if spec.name.startswith("mtp."):
            for_draft.append((draft._remap_dspark_weight_name(spec.name), spec))
        else:
            name = target.remap_weight_name_to_dpsk_hf_format(spec.name)
            for_target.append((name, spec))
    assert_fills(target, for_target)
    assert_fills(draft, for_draft)


def test_sglang_recognises_the_packed_experts(small: Path) -> None:
    """Red if the experts' dtype is one that SGLang does not take for packed FP4."""
    pytest.importorskip("sglang", reason="needs an SGLang tree on PYTHONPATH")
    from sglang.srt.configs.deepseek_v4 import try_detect_fp4_experts

    assert try_detect_fp4_experts(str(small)) is True
