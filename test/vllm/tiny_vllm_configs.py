"""Real vLLM configurations of tiny models, made without a GPU."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from unittest import mock

# vLLM decides on its platform when it is imported.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

from vllm.config import LoadConfig, SpeculativeConfig, VllmConfig  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402

_COMMON = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "intermediate_size": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 1,
}
_MODELS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    # Its MTP draft declares no weights.
    "mimo": {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
    },
    # Its MTP draft declares its weights.
    "qwen3_next": {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
    },
    # Its DSpark draft lies in the same checkpoint.
    "deepseek_v41": {
        "architectures": ["DeepseekV41ForCausalLM"],
        "model_type": "deepseek_v41",
        "text_config": {**_COMMON, "n_routed_experts": 2, "dspark_block_size": 4},
    },
    "qwen3_dspark": {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 2,
        "dflash_config": {"target_layer_ids": [0], "mask_token_id": 3},
    },
}


def write_model(folder: Path, kind: str) -> str:
    """Write the configuration of a tiny model; its folder as vLLM takes it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(_COMMON | _MODELS[kind]))
    return str(folder)


def engine_config(
    folder: str,
    load_config: LoadConfig,
    /,
    *,
    parallel: dict[str, Any] | None = None,
    **speculative: Any,
) -> VllmConfig:
    """What a worker of vLLM gets, with the draft that ``speculative`` asks for."""
    # A process per model class would ask what this process can tell.
    with (
        mock.patch.dict(os.environ),
        mock.patch.object(registry, "_run_in_subprocess", lambda function: function()),
    ):
        config = EngineArgs(
            model=folder,
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=32,
        ).create_engine_config()
        config.load_config = load_config
        for name, value in (parallel or {}).items():
            setattr(config.parallel_config, name, value)
        # Afterwards, because the CPU's model runner does not know every method.
        config.speculative_config = SpeculativeConfig(
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
            num_speculative_tokens=1,
            **speculative,
        )
    return config
