"""A tiny MiMo checkpoint whose MTP draft often guesses what the target will say.

The head's rows are the embedding's in another order, so that a token leads to the next
one of a long cycle; the layers disturb that, enough to matter for what is said.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _HEAD, _INNER = 128, 2, 4, 2, 32, 256
# How much a layer adds to the residual stream, for the target's and the draft's.
_TARGET_NOISE, _DRAFT_NOISE = 2.5, 0.2

_CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": _HIDDEN,
    "num_hidden_layers": _LAYERS,
    "num_attention_heads": _HEADS,
    "num_key_value_heads": _KV_HEADS,
    "head_dim": _HEAD,
    "intermediate_size": _INNER,
    "hidden_act": "silu",
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "attention_bias": True,
    "use_sliding_window": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": 256,
    "num_nextn_predict_layers": 1,
}
DRAFT = "model.mtp_layers.0."


def write_checkpoint(folder: Path, *, changed: str | None = None) -> None:
    """Write configuration, tokenizer and two shards; negate the tensor ``changed``.

    The draft's tensors share the first shard with some of the target's.
    """
    folder.mkdir(parents=True)
    _write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    tensors = {n: t.to(torch.bfloat16).contiguous() for n, t in _tensors().items()}
    if changed is not None:
        tensors[changed] = -tensors[changed]
    first = ("model.embed_tokens.", "model.layers.0.", DRAFT)
    shards: dict[str, dict[str, torch.Tensor]] = {"model-1": {}, "model-2": {}}
    for name, tensor in tensors.items():
        shards["model-1" if name.startswith(first) else "model-2"][name] = tensor
    weight_map = {}
    for shard, held in shards.items():
        save_file(held, folder / f"{shard}.safetensors", {"format": "pt"})
        weight_map |= dict.fromkeys(held, f"{shard}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def _tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, scale: float) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    embedding = random(VOCABULARY, _HIDDEN, scale=1.0)
    embedding *= _HIDDEN**0.5 / embedding.norm(dim=1, keepdim=True)
    successors = torch.randperm(VOCABULARY, generator=generator)
    head = torch.empty_like(embedding)
    head[successors] = embedding * 0.1
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": head,
        "model.norm.weight": torch.ones(_HIDDEN),
    }
    noises = {f"model.layers.{i}.": _TARGET_NOISE for i in range(_LAYERS)}
    widths = {"q": _HEADS * _HEAD, "k": _KV_HEADS * _HEAD, "v": _KV_HEADS * _HEAD}
    inner = _HEADS * _HEAD
    for prefix, noise in (noises | {DRAFT: _DRAFT_NOISE}).items():
        layer = {
            "self_attn.o_proj.weight": random(
                _HIDDEN, inner, scale=noise * inner**-0.5
            ),
            "mlp.gate_proj.weight": random(_INNER, _HIDDEN, scale=_HIDDEN**-0.5),
            "mlp.up_proj.weight": random(_INNER, _HIDDEN, scale=_HIDDEN**-0.5),
            "mlp.down_proj.weight": random(_HIDDEN, _INNER, scale=noise * _INNER**-0.5),
            "input_layernorm.weight": torch.ones(_HIDDEN),
            "post_attention_layernorm.weight": torch.ones(_HIDDEN),
        }
        for part, width in widths.items():
            name = f"self_attn.{part}_proj"
            layer[f"{name}.weight"] = random(width, _HIDDEN, scale=_HIDDEN**-0.5)
            layer[f"{name}.bias"] = torch.zeros(width)
        tensors |= {prefix + name: tensor for name, tensor in layer.items()}
    for norm in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        tensors[f"{DRAFT}{norm}.weight"] = torch.ones(_HIDDEN)
    # The draft looks at the last token alone, not at the target's hidden state.
    halves = [torch.zeros(_HIDDEN, _HIDDEN), torch.eye(_HIDDEN)]
    tensors[f"{DRAFT}input_proj.weight"] = torch.cat(halves, dim=1)
    return tensors


def _write_tokenizer(folder: Path) -> None:
    """A tokenizer of single bytes, filled up with names for the other tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    missing = VOCABULARY - tokenizer.get_vocab_size()
    tokenizer.add_tokens([AddedToken(f"<{number}>") for number in range(missing)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<end>",
        "model_max_length": 2048,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
