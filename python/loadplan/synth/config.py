"""The ``config.json`` of a synthetic model."""

from __future__ import annotations

from loadplan.synth.model import STAGES, SynthModel
from loadplan.synth.scale import BLOCK, ENGRAM_DIM, HYPER_STREAMS


def config(model: SynthModel) -> dict[str, object]:
    """The ``config.json`` that the engine's DeepSeek-V4.1 configuration reads."""
    scale = model.scale
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
        "compress_ratios": scale.compress_ratios,
        "kv_source_layer_ids": scale.compressors,
        "index_source_layer_ids": scale.compressors,
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
        "hc_mult": HYPER_STREAMS,
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
            "dspark_target_layer_ids": list(range(scale.layers - STAGES, scale.layers)),
            "dspark_n_routed_experts": model.draft_experts,
            "dspark_num_experts_per_tok": 4,
            "num_nextn_predict_layers": STAGES,
        }
    return values
