"""A DeepSeek-V4.1 of a few kilobytes, its DSpark draft and checkpoints for both.

The models are TokenSpeed's own with all their layers; only the choice of a MoE kernel
and the rearranging of loaded experts are stubbed.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.forkserver
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file
from sympy import isprime

from loadplan.standin.gpu import Journal, fake_gpu
from loadplan.standin.tokenspeed import fake_moe_kernels
from tokenspeed.runtime.configs.deepseek_v41_config import DeepseekV41Config
from tokenspeed.runtime.configs.load_config import LoadConfig
from tokenspeed.runtime.distributed import Mapping
from tokenspeed.runtime.layers.quantization.fp8 import Fp8Config
from tokenspeed.runtime.model_loader.loader import DefaultModelLoader
from tokenspeed.runtime.model_loader.utils import set_default_torch_dtype
from tokenspeed.runtime.models.deepseek_v41 import DeepseekV41ForCausalLM
from tokenspeed.runtime.models.deepseek_v41_dspark import DeepseekV41ForCausalLMDSpark
from tokenspeed.runtime.utils.env import global_server_args_dict

BLOCK = 32
FP8, E8M0, INT8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8
BF16, F32 = torch.bfloat16, torch.float32

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def tiny_config() -> DeepseekV41Config:
    """Three layers, a table in the second and third, and two draft stages.

    Heads, groups and experts divide by a TP size of 1 and 2, the tables' rows do not.
    """
    text = {
        "vocab_size": 256,
        "hidden_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "qk_rope_head_dim": 32,
        "q_lora_rank": 64,
        "o_lora_rank": 64,
        "o_groups": 4,
        "sliding_window": 64,
        "max_position_embeddings": 128,
        "rope_theta": 10000.0,
        "compress_rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "type": "yarn",
            "factor": 2.0,
            "beta_fast": 32,
            "beta_slow": 1,
            "original_max_position_embeddings": 64,
        },
        "compress_ratios": [2, 1, 1],
        "kv_source_layer_ids": [0, 2],
        "index_source_layer_ids": [0, 2],
        "candidate_source_layer_id": 2,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 4,
        "moe_intermediate_size": 128,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "expert_dtype": "fp4",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 2,
        "hc_eps": 1e-6,
        "engram_layer_ids": [1, 2],
        "engram_max_ngram_size": 4,
        "engram_n_heads": 3,
        "engram_vocab_size": 16,
        "engram_head_dim": 2 * BLOCK,
        "engram_compressed_vocab_size": 9,
        "engram_pad_token_id": 0,
        "dspark_num_stages": 2,
        "num_nextn_predict_layers": 2,
        "dspark_block_size": 2,
        "dspark_markov_rank": 8,
        "dspark_target_layer_ids": [0, 2],
        "dspark_n_routed_experts": 4,
        "dspark_num_experts_per_tok": 2,
        "dspark_noise_token_id": 1,
    }
    # Each hash column has the next prime of rows.
    primes = iter(n for n in range(text["engram_vocab_size"], 1000) if isprime(n))
    columns = 3 * text["engram_n_heads"]
    text["engram_num_embeddings"] = [
        sum(next(primes) for _ in range(columns)) for _ in text["engram_layer_ids"]
    ]
    return DeepseekV41Config(text_config=text)


def _linear(name: str, rows: int, columns: int, *, fp4: bool = False) -> Specs:
    weight = (INT8, (rows, columns // 2)) if fp4 else (FP8, (rows, columns))
    scale = (E8M0, (rows if fp4 else rows // BLOCK, columns // BLOCK))
    return {f"{name}.weight": weight, f"{name}.scale": scale}


def _block(c: Any, prefix: str) -> Specs:
    """What a target layer and a draft stage have alike."""
    attn, ffn, hidden = f"{prefix}.attn", f"{prefix}.ffn", c.hidden_size
    heads = c.num_attention_heads * c.head_dim
    specs: Specs = {
        f"{attn}.attn_sink": (F32, (c.num_attention_heads,)),
        f"{attn}.q_norm.weight": (BF16, (c.q_lora_rank,)),
        f"{attn}.kv_norm.weight": (BF16, (c.head_dim,)),
        f"{ffn}.gate.weight": (BF16, (c.n_routed_experts, hidden)),
        f"{ffn}.gate.bias": (F32, (c.n_routed_experts,)),
        f"{prefix}.attn_norm.weight": (BF16, (hidden,)),
        f"{prefix}.ffn_norm.weight": (BF16, (hidden,)),
    }
    mixes = c.hc_mult * (c.hc_mult + 2)
    for part in ("hc_attn", "hc_ffn"):
        specs[f"{prefix}.{part}_fn"] = (F32, (mixes, c.hc_mult * hidden))
        specs[f"{prefix}.{part}_base"] = (F32, (mixes,))
        specs[f"{prefix}.{part}_scale"] = (F32, (3,))
    specs |= _linear(f"{attn}.wq_a", c.q_lora_rank, hidden)
    specs |= _linear(f"{attn}.wkv", c.head_dim, hidden)
    specs |= _linear(f"{attn}.wq_b", heads, c.q_lora_rank)
    specs |= _linear(f"{attn}.wo_a", c.o_groups * c.o_lora_rank, heads // c.o_groups)
    specs |= _linear(f"{attn}.wo_b", hidden, c.o_groups * c.o_lora_rank)
    experts = [f"{ffn}.experts.{i}" for i in range(c.n_routed_experts)]
    for owner in (*experts, f"{ffn}.shared_experts"):
        fp4 = owner in experts
        for name in ("w1", "w3"):
            specs |= _linear(
                f"{owner}.{name}", c.moe_intermediate_size, hidden, fp4=fp4
            )
        specs |= _linear(f"{owner}.w2", hidden, c.moe_intermediate_size, fp4=fp4)
    return specs


def _layer(c: Any, layer_id: int) -> Specs:
    prefix = f"layers.{layer_id}"
    attn, engram = f"{prefix}.attn", f"{prefix}.engram"
    specs = _block(c, prefix)
    if layer_id in c.kv_source_layer_ids:
        names = ("wkv", "wgate") if c.compress_ratios[layer_id] == 2 else ("wkv",)
        for name in names:
            shape = (c.head_dim, c.hidden_size)
            specs[f"{attn}.compressor.{name}.weight"] = (BF16, shape)
        specs[f"{attn}.compressor.norm.weight"] = (BF16, (c.head_dim,))
        shape = (c.index_head_dim, c.head_dim)
        specs[f"{attn}.indexer.wk.weight"] = (BF16, shape)
        specs[f"{attn}.indexer.k_norm.weight"] = (BF16, (c.index_head_dim,))
    if layer_id in c.index_source_layer_ids:
        heads = c.index_n_heads * c.index_head_dim
        specs |= _linear(f"{attn}.indexer.wq_b", heads, c.q_lora_rank)
        shape = (c.index_n_heads, c.hidden_size)
        specs[f"{attn}.indexer.weights_proj.weight"] = (BF16, shape)
    if layer_id in c.engram_layer_ids:
        columns = 3 * c.engram_n_heads * c.engram_head_dim
        wide = (c.hc_mult + 1) * c.hidden_size
        specs |= _linear(f"{engram}.wkv", wide, columns)
        for name in ("q_weight", "k_weight"):
            specs[f"{engram}.{name}"] = (BF16, (c.hc_mult, c.hidden_size))
        rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer_id)]
        specs[f"{engram}.embed.weight"] = (FP8, (rows, c.engram_head_dim))
        specs[f"{engram}.embed.scale"] = (E8M0, (rows, c.engram_head_dim // BLOCK))
    return specs


def _draft(c: Any) -> Specs:
    stages = [f"mtp.{stage}" for stage in range(c.dspark_num_stages)]
    specs: Specs = {}
    for stage in stages:
        specs |= _block(c, stage)
    first, last, hidden = stages[0], stages[-1], c.hidden_size
    taps = len(c.dspark_target_layer_ids)
    specs |= _linear(f"{first}.main_proj", hidden, taps * hidden)
    specs[f"{first}.main_norm.weight"] = (BF16, (hidden,))
    specs[f"{last}.norm.weight"] = (BF16, (hidden,))
    markov = (c.vocab_size, c.dspark_markov_rank)
    specs[f"{last}.markov_head.embed.weight"] = (BF16, markov)
    specs[f"{last}.markov_head.head.weight"] = (BF16, markov)
    confidence = (1, hidden + c.dspark_markov_rank)
    specs[f"{last}.confidence_head.proj.weight"] = (BF16, confidence)
    return specs


def is_table(name: str) -> bool:
    return ".engram.embed." in name


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def tiny_checkpoint(
    folder: str, *, tables_alone: bool, draft_alone: bool
) -> dict[str, bytes]:
    """Write shards and index; return the bytes of every tensor by name.

    Each layer has a file. Tables and the draft have files of their own, or else share
    those of their layer and of the last layer.
    """
    c = tiny_config().text_config
    last = c.num_hidden_layers - 1
    shards = {f"layer-{i}": _layer(c, i) for i in range(c.num_hidden_layers)}
    shards["vocab"] = {
        "embed.weight": (BF16, (c.vocab_size, c.hidden_size)),
        "head.weight": (BF16, (c.vocab_size, c.hidden_size)),
        "norm.weight": (BF16, (c.hidden_size,)),
    }
    draft = "draft" if draft_alone else f"layer-{last}"
    shards[draft] = shards.get(draft, {}) | _draft(c)
    for layer_id in c.engram_layer_ids if tables_alone else ():
        layer = shards[f"layer-{layer_id}"]
        tables = list(filter(is_table, layer))
        shards[f"engram-{layer_id}"] = {name: layer.pop(name) for name in tables}

    content: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    for label, specs in shards.items():
        tensors = {name: random_tensor(name, *spec) for name, spec in specs.items()}
        save_file(tensors, Path(folder, f"model-{label}.safetensors"))
        content |= {name: tensor_bytes(tensor) for name, tensor in tensors.items()}
        weight_map |= dict.fromkeys(tensors, f"model-{label}.safetensors")
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    Path(folder, "model.safetensors.index.json").write_text(index)
    return content


def random_tensor(
    name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    """Always the same values for a name."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    if dtype in (BF16, F32):
        return torch.randn(shape, generator=generator).to(dtype)
    # Every byte value, NaN patterns too: loading must not look at the values.
    values = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    return values.view(dtype)


def target(mapping: Mapping, layout: str) -> DeepseekV41ForCausalLM:
    """The whole target; ``layout`` of its tables is gpu, shared or sharded."""
    return built(
        lambda: DeepseekV41ForCausalLM(tiny_config(), mapping, _quant(), False, None),
        mapping,
        engram_host_table=layout != "gpu",
        engram_host_table_layout="auto" if layout == "gpu" else layout,
    )


def draft(mapping: Mapping) -> DeepseekV41ForCausalLMDSpark:
    return built(
        lambda: DeepseekV41ForCausalLMDSpark(tiny_config(), mapping, _quant()), mapping
    )


def _quant() -> Fp8Config:
    return Fp8Config(
        is_checkpoint_fp8_serialized=True,
        activation_scheme="dynamic",
        weight_block_size=[BLOCK, BLOCK],
        scale_fmt="ue8m0",
    )


def built(make: Callable[[], Any], mapping: Mapping, **server_args: Any) -> Any:
    """The model that ``make`` builds, in bfloat16 and with these server arguments."""
    arguments = mock.patch.dict(global_server_args_dict, mapping=mapping, **server_args)
    with arguments, fake_moe_kernels(), set_default_torch_dtype(BF16):
        model = make()
    for name, parameter in model.named_parameters():
        # What nothing loads must be the same each time. Ranks share tables.
        if not is_table(name):
            parameter.data.view(torch.uint8).fill_(0xA5)
    return model


def weights_of(model: Any, folder: str, load_format: str = "instanttensor") -> Iterable:
    """The iterator that the loader hands to the model's ``load_weights``."""
    config = LoadConfig(
        load_format=load_format, weight_loader_prefetch_checkpoints=False
    )
    model_config = SimpleNamespace(model_path=folder, revision=None)
    return DefaultModelLoader(config)._get_all_weights(model_config, model)


def load(model: Any, folder: str, load_format: str = "instanttensor") -> dict:
    """Load ``model``; the bytes of its parameters by name."""
    with fake_moe_kernels():
        model.load_weights(weights_of(model, folder, load_format))
    return {name: tensor_bytes(p) for name, p in model.named_parameters()}


def tiny_gpu(**options: Any) -> AbstractContextManager[Journal]:
    """A machine that looks as if it had a GPU and InstantTensor; yields the journal."""
    return fake_gpu(engine="tokenspeed", **options)


def mapping_of(rank: int, tp_size: int) -> Mapping:
    return Mapping(
        rank=rank, world_size=tp_size, attn_tp_size=tp_size, moe_tp_size=tp_size
    )


def run_ranks(
    world_size: int, work: Callable[..., Any], *args: Any, timeout: float = 120.0
) -> list[Any]:
    """Run ``work(rank, world_size, *args)`` in a process per rank; results by rank.

    A rank that fails raises RuntimeError with its traceback, one that is silent for
    ``timeout`` seconds TimeoutError; both end every rank.
    """
    # A fork server pays for the engine's import once and has no threads to lose. It
    # takes the modules to import along, but not the path to find them on.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        multiprocessing.forkserver.ensure_running()
    pipes, processes, results = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        try:
            for rank in range(world_size):
                pipe, rank_pipe = context.Pipe()
                arguments = (rank_pipe, rank, world_size, folder, work, args)
                process = context.Process(
                    target=_rank_main, args=arguments, daemon=True
                )
                process.start()
                rank_pipe.close()
                pipes.append(pipe)
                processes.append(process)
            deadline = time.monotonic() + timeout
            for rank, pipe in enumerate(pipes):
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"no result from rank {rank} in {timeout} s")
                result, error = pipe.recv()
                if error is not None:
                    raise RuntimeError(f"rank {rank} failed:\n{error}")
                results.append(result)
        finally:
            for process, pipe in zip(processes, pipes, strict=True):
                process.kill()
                process.join()
                pipe.close()
    return results


def _rank_main(
    pipe: Any,
    rank: int,
    world_size: int,
    folder: str,
    work: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        torch.set_num_threads(1)
        torch.distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
        )
        pipe.send((work(rank, world_size, *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    # A peer may still be in the last collective: stay until the parent hangs up.
    pipe.poll(None)
