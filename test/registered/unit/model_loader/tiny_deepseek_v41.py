"""A tiny DeepSeek-V4.1 whose ranks load weights on a machine without a GPU.

Real: the target and DSpark draft with their whole module trees (FP8 dense weights
with 32x32 block scales, packed FP4 experts, Engram tables), published server
arguments, gloo process groups, one process per rank. Not real: the CUDA calls in
``fake_host_registration`` and one flag in ``tiny_model``. No forward can run.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import multiprocessing.forkserver
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import patch

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import nn
from transformers import PretrainedConfig

from loadplan.standin.gpu import fake_gpu
from sglang.srt.configs.deepseek_v41 import DeepseekV41Config
from sglang.srt.configs.load_config import LoadConfig
from sglang.srt.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
    set_custom_all_reduce,
)
from sglang.srt.layers import engram
from sglang.srt.layers.engram import EngramEmbedding
from sglang.srt.layers.quantization.fp8 import Fp8Config
from sglang.srt.layers.rotary_embedding import base as rope_base
from sglang.srt.model_loader.loader import DefaultModelLoader
from sglang.srt.model_loader.utils import set_default_torch_dtype
from sglang.srt.models.deepseek_v4 import DeepseekV4ForCausalLM
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from sglang.srt.runtime_context import SpawnRanks, get_serving, publish
from sglang.srt.server_args import ServerArgs

BLOCK = 32  # rows and columns per FP8 block scale, values per Engram or FP4 scale
FP8, E8M0, INT8 = torch.float8_e4m3fn, torch.float8_e8m0fnu, torch.int8
BF16, F32 = torch.bfloat16, torch.float32

# The engine's own switches: no GPU even where there is one, groups that need nothing
# but gloo, and no MHC kernel compiled after loading.
_NO_DEVICE_ENV = {
    "LOADPLAN_TEST_GPU": "",
    "CUDA_VISIBLE_DEVICES": "99",
    "SGLANG_NCCL_SO_PATH": "no-nccl-without-a-device",
    "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER": "0",
    "SGLANG_OPT_USE_TILELANG_MHC_PRE": "0",
}

Specs = dict[str, tuple[torch.dtype, tuple[int, ...]]]


def tiny_config(
    *,
    engram_layer_ids: tuple[int, ...] = (1, 2),
    engram_heads: int = 2,
    engram_column_rows: int = 500,
) -> DeepseekV41Config:
    """Three layers and two draft stages that divide by a TP size of 1, 2 and 4.

    A table has 2 * engram_heads columns of engram_column_rows rows or a few more. If
    the TP size divides the columns, ranks own whole columns and differ in rows.
    """
    config = DeepseekV41Config(
        architectures=["DeepseekV4ForCausalLM"],
        vocab_size=256,
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=32,
        qk_rope_head_dim=16,
        q_lora_rank=32,
        o_lora_rank=32,
        o_groups=4,
        sliding_window=64,
        max_position_embeddings=128,
        # A ratio of 0 needs plain RoPE, which the engine lacks on a CPU.
        compress_ratios=[2, 1, 1],
        compress_rope_theta=10000.0,
        rope_parameters={
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 64,
        },
        kv_source_layer_ids=[0],
        index_source_layer_ids=[0, 2],
        index_n_heads=2,
        index_head_dim=16,
        index_topk=4,
        moe_intermediate_size=128,
        n_routed_experts=4,
        num_experts_per_tok=2,
        topk_method="noaux_tc",
        scoring_func="sqrtsoftplus",
        hc_mult=4,
        hc_sinkhorn_iters=2,
        hc_eps=1e-6,
        engram_layer_ids=list(engram_layer_ids),
        engram_max_ngram_size=3,
        engram_vocab_size=engram_column_rows,
        engram_n_heads=engram_heads,
        engram_head_dim=2 * BLOCK,
        engram_compressed_vocab_size=256,
        dspark_block_size=2,
        dspark_markov_rank=8,
        dspark_target_layer_ids=[0, 2],
    )
    layout = engram.EngramLayout.from_config(config)
    config.engram_num_embeddings = [
        layout.column_bounds(i)[-1] for i in range(len(engram_layer_ids))
    ]
    return config


def linear(name: str, rows: int, columns: int, *, fp4: bool = False) -> Specs:
    weight = (INT8, (rows, columns // 2)) if fp4 else (FP8, (rows, columns))
    scale = (E8M0, (rows if fp4 else rows // BLOCK, columns // BLOCK))
    return {f"{name}.weight": weight, f"{name}.scale": scale}


def block_specs(c: DeepseekV41Config, prefix: str) -> Specs:
    """What a target layer and a draft stage have in common."""
    attn, ffn = f"{prefix}.attn", f"{prefix}.ffn"
    hidden, inter, q_rank = c.hidden_size, c.moe_intermediate_size, c.q_lora_rank
    q_dim, o_dim = c.num_attention_heads * c.head_dim, c.o_groups * c.o_lora_rank
    specs: Specs = {
        f"{prefix}.attn_norm.weight": (BF16, (hidden,)),
        f"{prefix}.ffn_norm.weight": (BF16, (hidden,)),
        f"{attn}.attn_sink": (F32, (c.num_attention_heads,)),
        f"{attn}.q_norm.weight": (BF16, (q_rank,)),
        f"{attn}.kv_norm.weight": (BF16, (c.head_dim,)),
        **linear(f"{attn}.wq_a", q_rank, hidden),
        **linear(f"{attn}.wq_b", q_dim, q_rank),
        **linear(f"{attn}.wkv", c.head_dim, hidden),
        **linear(f"{attn}.wo_a", o_dim, q_dim // c.o_groups),
        **linear(f"{attn}.wo_b", hidden, o_dim),
        f"{ffn}.gate.weight": (BF16, (c.n_routed_experts, hidden)),
        f"{ffn}.gate.bias": (F32, (c.n_routed_experts,)),
    }
    experts = [f"experts.{i}" for i in range(c.n_routed_experts)]
    for expert in ("shared_experts", *experts):
        fp4 = expert != "shared_experts"
        specs |= linear(f"{ffn}.{expert}.w1", inter, hidden, fp4=fp4)
        specs |= linear(f"{ffn}.{expert}.w2", hidden, inter, fp4=fp4)
        specs |= linear(f"{ffn}.{expert}.w3", inter, hidden, fp4=fp4)
    mixes = (2 + c.hc_mult) * c.hc_mult
    for part in ("attn", "ffn"):
        specs[f"{prefix}.hc_{part}_fn"] = (F32, (mixes, c.hc_mult * hidden))
        specs[f"{prefix}.hc_{part}_base"] = (F32, (mixes,))
        specs[f"{prefix}.hc_{part}_scale"] = (F32, (3,))
    return specs


def _layer_specs(c: DeepseekV41Config, layer_id: int) -> Specs:
    prefix, hidden = f"layers.{layer_id}", c.hidden_size
    compressor, indexer = f"{prefix}.attn.compressor", f"{prefix}.attn.indexer"
    specs = block_specs(c, prefix)
    if layer_id in c.kv_source_layer_ids:
        specs[f"{compressor}.norm.weight"] = (BF16, (c.head_dim,))
        specs[f"{compressor}.wkv.weight"] = (BF16, (c.head_dim, hidden))
        if c.compress_ratios[layer_id] > 1:
            specs[f"{compressor}.wgate.weight"] = (BF16, (c.head_dim, hidden))
        specs[f"{indexer}.wk.weight"] = (BF16, (c.index_head_dim, c.head_dim))
        specs[f"{indexer}.k_norm.weight"] = (BF16, (c.index_head_dim,))
    if layer_id in c.index_source_layer_ids:
        heads_dim = c.index_n_heads * c.index_head_dim
        specs |= linear(f"{indexer}.wq_b", heads_dim, c.q_lora_rank)
        specs[f"{indexer}.weights_proj.weight"] = (BF16, (c.index_n_heads, hidden))
    if layer_id in c.engram_layer_ids:
        memory, dim = f"{prefix}.engram", c.engram_head_dim
        rows = c.engram_num_embeddings[c.engram_layer_ids.index(layer_id)]
        columns = (c.engram_max_ngram_size - 1) * c.engram_n_heads
        specs[f"{memory}.embed.weight"] = (FP8, (rows, dim))
        specs[f"{memory}.embed.scale"] = (E8M0, (rows, dim // BLOCK))
        specs |= linear(f"{memory}.wkv", hidden * (c.hc_mult + 1), columns * dim)
        specs[f"{memory}.q_weight"] = (BF16, (c.hc_mult, hidden))
        specs[f"{memory}.k_weight"] = (BF16, (c.hc_mult, hidden))
    return specs


def draft_specs(c: DeepseekV41Config) -> Specs:
    hidden, stages = c.hidden_size, len(c.dspark_target_layer_ids)
    last, rank = f"mtp.{stages - 1}", c.dspark_markov_rank
    specs = linear("mtp.0.main_proj", hidden, hidden * stages)
    for stage in range(stages):
        specs |= block_specs(c, f"mtp.{stage}")
    return specs | {
        "mtp.0.main_norm.weight": (BF16, (hidden,)),
        f"{last}.norm.weight": (BF16, (hidden,)),
        f"{last}.markov_head.embed.weight": (BF16, (c.vocab_size, rank)),
        f"{last}.markov_head.head.weight": (BF16, (c.vocab_size, rank)),
        f"{last}.confidence_head.proj.weight": (F32, (1, hidden + rank)),
    }


def tensor_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().cpu().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def tiny_checkpoint(
    folder: str | os.PathLike[str],
    config: DeepseekV41Config,
    *,
    seed: int = 0,
    tables_in_own_files: bool = True,
    draft_in_own_file: bool = True,
) -> dict[str, bytes]:
    """Write shards, index and config.json; return the bytes of every tensor by name.

    Each layer has a file. Tables without files of their own stay with their layer,
    a draft without one shares the last layer's.
    """
    c, last = config, config.num_hidden_layers - 1
    shards: dict[str, Specs] = {f"layer-{i}": _layer_specs(c, i) for i in range(last)}
    shards[f"layer-{last}"] = _layer_specs(c, last)
    shards["vocab"] = {
        "embed.weight": (BF16, (c.vocab_size, c.hidden_size)),
        "head.weight": (BF16, (c.vocab_size, c.hidden_size)),
        "norm.weight": (BF16, (c.hidden_size,)),
    }
    draft_shard = "draft" if draft_in_own_file else f"layer-{last}"
    shards[draft_shard] = shards.get(draft_shard, {}) | draft_specs(c)
    for layer_id in c.engram_layer_ids if tables_in_own_files else ():
        layer = shards[f"layer-{layer_id}"]
        tables = [name for name in layer if ".engram.embed." in name]
        shards[f"engram-{layer_id}"] = {name: layer.pop(name) for name in tables}

    content = write_shards(folder, shards, seed=seed)
    Path(folder, "config.json").write_text(config.to_json_string())
    return content


def write_shards(
    folder: str | os.PathLike[str],
    shards: Mapping[str, Specs],
    *,
    seed: int = 0,
    unindexed: tuple[str, ...] = (),
) -> dict[str, bytes]:
    """Write random tensors and an index; return the bytes of every tensor by name."""
    generator = torch.Generator().manual_seed(seed)

    def random(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        if dtype in (BF16, F32):
            return torch.randn(shape, generator=generator).to(dtype)
        # Every byte value, NaN patterns too: loading must not look at the values.
        values = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
        return values.view(dtype)

    content: dict[str, bytes] = {}
    weight_map: dict[str, str] = {}
    for label, specs in shards.items():
        tensors = {name: random(*spec) for name, spec in specs.items()}
        save_file(tensors, Path(folder, f"model-{label}.safetensors"))
        content |= {name: tensor_bytes(tensor) for name, tensor in tensors.items()}
        if label not in unindexed:
            weight_map |= dict.fromkeys(tensors, f"model-{label}.safetensors")
    total = {"total_size": sum(map(len, content.values()))}
    index = json.dumps({"metadata": total, "weight_map": weight_map})
    Path(folder, "model.safetensors.index.json").write_text(index)
    return content


def read_checkpoint(
    folder: str | os.PathLike[str],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of every shard, each a CPU tensor over the mapped file."""
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as shard:
            for name in shard.keys():
                yield name, shard.get_tensor(name)


def host_table_env(layout: Optional[str]) -> dict[str, str]:
    """Environment that puts the Engram tables on the host, none for layout None."""
    if layout is None:
        return {}
    return {
        "SGLANG_ENABLE_DSV41_ENGRAM_HOST_TABLE": "1",
        "SGLANG_DSV41_ENGRAM_HOST_TABLE_LAYOUT": layout,
    }


@contextmanager
def fake_host_registration() -> Iterator[None]:
    """Let a host table register its memory although there is no CUDA."""
    cudart = SimpleNamespace(cudaHostRegister=lambda pointer, nbytes, flags: 0)
    with (
        patch.object(torch.cuda, "cudart", lambda: cudart),
        patch.object(torch.cuda, "current_device", lambda: 0),
        patch.object(engram, "_sorted_host_reads", lambda device: False),
    ):
        yield


def tiny_model(
    config: PretrainedConfig,
    model_class: type[nn.Module] = DeepseekV4ForCausalLM,
    *,
    quantized: bool = True,
) -> nn.Module:
    """This rank's target, or draft if model_class says so, with unset weights."""
    quant_config = None
    if quantized:
        quant_config = Fp8Config(
            is_checkpoint_fp8_serialized=True,
            weight_block_size=[BLOCK, BLOCK],
            is_fp4_experts=True,
            scale_fmt="ue8m0",
        )
    words = WordLevel({f"t{i}": i for i in range(config.vocab_size)}, unk_token="t0")
    with (
        tempfile.TemporaryDirectory() as folder,
        get_serving().override(tokenizer_path=folder, tokenizer_mode="auto"),
        fake_host_registration(),
        # Otherwise RoPE, which has no weights, imports a kernel from vLLM.
        patch.object(rope_base, "_is_cpu", True),
        set_default_torch_dtype(BF16),
    ):
        Tokenizer(words).save(f"{folder}/tokenizer.json")
        tokenizer_config = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"})
        Path(folder, "tokenizer_config.json").write_text(tokenizer_config)
        return model_class(config, quant_config=quant_config)


def parameter_digests(model: nn.Module) -> dict[str, str]:
    # Off CUDA, a loaded layer also holds its successor, under a second name.
    return {
        name: hashlib.sha256(tensor_bytes(parameter)).hexdigest()
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if "._next_layer." not in name
    }


def model_config_of(folder: str) -> SimpleNamespace:
    """What a loader asks of a ModelConfig."""
    return SimpleNamespace(
        model_path=folder,
        revision=None,
        hf_config=SimpleNamespace(architectures=["DeepseekV4ForCausalLM"]),
        dtype=BF16,
        quantization=None,
    )


def load_rank(
    rank: int,
    tp_size: int,
    folder: str,
    config: DeepseekV41Config,
    model_class: type[nn.Module],
    load_format: str,
) -> SimpleNamespace:
    """Load one rank's model: what was yielded, from where, and what it holds now.

    A target of ``run_ranks``. It stands here because a rank imports its module anew.
    """
    model = tiny_model(config, model_class)
    loader = DefaultModelLoader(LoadConfig(load_format=load_format))
    names, on_host = [], []
    with fake_gpu() as journal:

        def noted(weights):
            for name, tensor in weights:
                names.append(name)
                if not journal.on_device(tensor):
                    on_host.append(name)
                yield name, tensor

        weights = loader._get_all_weights(model_config_of(folder), model)
        model.load_weights(noted(weights))
    tables = {}
    for module_name, module in model.named_modules():
        # Off CUDA, a loaded layer also holds its successor, under a second name.
        if isinstance(module, EngramEmbedding) and "._next_layer." not in module_name:
            for part in ("weight", "scale"):
                name = f"{module_name.removeprefix('model.')}.{part}"
                digest = hashlib.sha256(tensor_bytes(getattr(module, part)))
                tables[name] = (module.row_start, module.rows, digest.hexdigest())
    return SimpleNamespace(
        names=sorted(names),
        on_host=sorted(on_host),
        streamed={os.path.basename(f) for call in journal.calls for f in call.files},
        tables=tables,
        digests=parameter_digests(model),
    )


def _rank_main(
    pipe: Connection,
    rank: int,
    tp_size: int,
    rendezvous: str,
    env: dict[str, str],
    server_args: dict[str, Any],
    group_timeout: Optional[int],
    target: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    try:
        os.environ.clear()
        os.environ.update(env)
        torch.set_num_threads(1)
        # Resolving arguments leaves this one model name alone.
        args_of_rank = {"model_path": "dummy", "device": "cpu", "tp_size": tp_size}
        publish(
            ServerArgs(**args_of_rank, **server_args),
            role="test",
            ranks=SpawnRanks(world_rank=rank),
        )
        set_custom_all_reduce(False)
        init_distributed_environment(
            world_size=tp_size,
            rank=rank,
            local_rank=rank,
            distributed_init_method=rendezvous,
            backend="gloo",
            timeout=group_timeout,
        )
        initialize_model_parallel(backend="gloo")
        pipe.send((target(rank, tp_size, *args), None))
    except BaseException:
        pipe.send((None, traceback.format_exc()))
    # A peer may still be in the last collective: stay until the parent hangs up.
    pipe.poll(None)


def run_ranks(
    tp_size: int,
    target: Callable[..., Any],
    *args: Any,
    timeout: float = 120.0,
    env: Optional[Mapping[str, str]] = None,
    server_args: Optional[Mapping[str, Any]] = None,
    group_timeout: Optional[int] = None,
) -> list[Any]:
    """Run ``target(rank, tp_size, *args)`` in a process per rank; results by rank.

    A rank sees this process's environment plus env, but none of its patches. A rank
    that fails raises RuntimeError with its traceback, one that is silent for timeout
    seconds TimeoutError; both end every rank. group_timeout is that of the groups, in
    seconds.
    """
    # A fork server pays for the engine's import once and has no threads to lose.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([DeepseekV4ForCausalLMDSpark.__module__, __name__])
    with patch.dict(os.environ, _NO_DEVICE_ENV):
        multiprocessing.forkserver.ensure_running()
    rank_env = {**os.environ, **_NO_DEVICE_ENV, **(env or {})}
    pipes: dict[Connection, int] = {}
    processes: list[multiprocessing.Process] = []
    results: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        common = (tp_size, f"file://{folder}/rendezvous", rank_env)
        common += (dict(server_args or {}), group_timeout, target, args)
        try:
            for rank in range(tp_size):
                pipe, rank_pipe = context.Pipe()
                pipes[pipe] = rank
                process = context.Process(
                    target=_rank_main, args=(rank_pipe, rank, *common), daemon=True
                )
                process.start()
                processes.append(process)
                rank_pipe.close()
            deadline = time.monotonic() + timeout
            while len(results) < tp_size:
                silent = {p: rank for p, rank in pipes.items() if rank not in results}
                ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
                if not ready:
                    ranks = sorted(silent.values())
                    raise TimeoutError(f"no result from ranks {ranks} in {timeout} s")
                for pipe in ready:
                    results[pipes[pipe]] = _receive(pipe, rank=pipes[pipe])
        finally:
            for pipe in pipes:
                pipe.close()
            for process in processes:
                process.join(timeout=10.0 if len(results) == tp_size else 0.0)
                process.kill()
                process.join()
    return [results[rank] for rank in range(tp_size)]


def _receive(pipe: Connection, *, rank: int) -> Any:
    try:
        result, error = pipe.recv()
    except EOFError as e:
        raise RuntimeError(f"rank {rank} died without a result") from e
    if error is not None:
        raise RuntimeError(f"rank {rank} failed:\n{error}")
    return result
