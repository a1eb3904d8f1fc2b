"""Tiny checkpoints in the two layouts that drafts are built from, and their text.

The model is a MiMo, that is a Qwen2 with a draft, of random weights. Its head is int4
and the unquantised one lies in a backup. Every byte follows from the code.
"""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from loadplan.drafter import packing
from loadplan.drafter.scheme import Scheme

VOCABULARY, WIDTH, GROUP = 320, 128, 32
SPECIAL = [256, 257, 258]
DRAFT = "model.mtp_layers.0."
LAYOUTS = ("sharded", "streamed")
BACKUPS = {
    "sharded": "model-00002-of-00002.safetensors.bak",
    "streamed": "model.safetensors.bak-orig",
}
HEAD_SHARDS = {
    "sharded": "model-00002-of-00002.safetensors",
    "streamed": "model.safetensors",
}
LINKED = {
    "sharded": ["model-00001-of-00002.safetensors"],
    "streamed": ["model-mtp.safetensors"],
}
OWN_SCHEME = Scheme("int4", GROUP, True)

_CONFIG = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "dtype": "bfloat16",
    "bos_token_id": 256,
    "eos_token_id": 256,
}
_QUANTIZATION = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["lm_head"],
            "weights": OWN_SCHEME.weights(),
            "input_activations": None,
            "output_activations": None,
        }
    },
    "ignore": [],
}


def tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    """The unquantised model and its draft's layer, BF16."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int, scale: float) -> torch.Tensor:
        made = torch.randn(*shape, generator=generator) * scale
        return made.to(torch.bfloat16)

    # What a trained model has: few directions carry most of a hidden state.
    spectrum = torch.arange(1, WIDTH + 1) ** -0.7
    embedding = torch.randn(VOCABULARY, WIDTH, generator=generator) * spectrum * 4
    found = {
        "model.embed_tokens.weight": embedding.to(torch.bfloat16),
        "model.norm.weight": torch.ones(WIDTH, dtype=torch.bfloat16),
        "lm_head.weight": noise(VOCABULARY, WIDTH, scale=0.3),
    }
    for layer in ("model.layers.0.", "model.layers.1.", DRAFT):
        sizes = {"q": WIDTH, "k": WIDTH // 2, "v": WIDTH // 2}
        for part, size in sizes.items():
            name = f"{layer}self_attn.{part}_proj"
            found[f"{name}.weight"] = noise(size, WIDTH, scale=0.05)
            found[f"{name}.bias"] = torch.zeros(size, dtype=torch.bfloat16)
        for name, shape in {
            "self_attn.o_proj": (WIDTH, WIDTH),
            "mlp.gate_proj": (192, WIDTH),
            "mlp.up_proj": (192, WIDTH),
            "mlp.down_proj": (WIDTH, 192),
        }.items():
            found[f"{layer}{name}.weight"] = noise(*shape, scale=0.05)
        for name in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{name}.weight"] = torch.ones(WIDTH, dtype=torch.bfloat16)
    return found


def write_model(folder: Path, seed: int = 0) -> Path:
    """The unquantised model in one file, for a capture."""
    folder.mkdir(parents=True)
    held = tensors(seed)
    save_file(held, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(_CONFIG))
    write_tokenizer(folder)
    return folder


def write_layout(folder: Path, layout: str, seed: int = 0) -> Path:
    """A checkpoint whose head is rounded to int4, in one of the LAYOUTS."""
    folder.mkdir(parents=True)
    floating = tensors(seed)
    head = floating["lm_head.weight"]
    scales = packing.find_scales(head, OWN_SCHEME)
    packed = packing.pack(head, scales, OWN_SCHEME, dtype=head.dtype)
    config = _CONFIG | {"quantization_config": _QUANTIZATION}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "generation_config.json").write_text('{"eos_token_id": 256}')
    write_tokenizer(folder)
    if layout == "sharded":
        (folder / "quantization_config.json").write_text(json.dumps(_QUANTIZATION))
        first = ("model.embed_tokens.", "model.layers.0.")
        second = HEAD_SHARDS[layout]
        homes = {
            n: LINKED[layout][0] if n.startswith(first) else second for n in floating
        }
    else:
        for name in ("preprocessor_config", "video_preprocessor_config"):
            (folder / f"{name}.json").write_text('{"size": 224}')
        (folder / "recipe.yaml").write_text("default_stage: {}\n")
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        mtp = LINKED[layout][0]
        homes = {
            n: mtp if n.startswith(DRAFT) else "model.safetensors" for n in floating
        }
    weight_map = {}
    for shard in set(homes.values()):
        held = {n: t for n, t in floating.items() if homes[n] == shard}
        if shard == HEAD_SHARDS[layout]:
            save_file(held, folder / BACKUPS[layout], {"format": "pt"})
            del held["lm_head.weight"]
            held |= {f"lm_head.{name}": tensor for name, tensor in packed.items()}
        save_file(held, folder / shard, {"format": "pt"})
        weight_map |= dict.fromkeys(held, shard)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return folder


def write_old_draft(folder: Path) -> None:
    """A draft's head and ids that are there already, under names of their own."""
    ids = torch.arange(0, 100, dtype=torch.int64)
    head = {"draft_lm_head.weight": torch.ones(100, WIDTH), "draft_ids": ids}
    save_file(head, folder / "fast_head.safetensors")
    torch.save(ids, folder / "vocab_map.pt")


def write_tokenizer(folder: Path) -> None:
    """Single bytes, an end, and two added tokens."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    tokenizer.add_tokens([AddedToken("<call>"), AddedToken("<think>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_text(path: Path, *, letters: int = 4000, seed: int = 0) -> Path:
    """Words drawn with the frequencies of a language, one byte a token."""
    words = [
        f"{w}{s}" for w in ("load", "plan", "draft", "token") for s in ("", "s", "er")
    ]
    generator = random.Random(seed)
    text = ""
    while len(text) < letters:
        text += generator.choices(words, range(len(words), 0, -1))[0]
        text += generator.choice("  \n.,ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789")
    path.write_text(text[:letters])
    return path


def hashes(folder: Path) -> dict[str, tuple[str, int, int, int]]:
    """Hash, mtime, inode and mode of every file: what no step may change."""
    return {
        path.relative_to(folder).as_posix(): (
            hashlib.sha256(path.read_bytes()).hexdigest(),
            path.stat().st_mtime_ns,
            path.stat().st_ino,
            path.stat().st_mode,
        )
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
