"""Models whose load_weights takes one tensor after the other, none kept behind it.

The models are whole and the engine's own; a checkpoint of each goes through the
released loader.
"""

import tempfile
import unittest
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from tiny_tokenspeed_v41 import (
    BF16,
    built,
    mapping_of,
    random_tensor,
    tensor_bytes,
    tiny_gpu,
    weights_of,
)
from transformers import GptOssConfig, PretrainedConfig

from tokenspeed.runtime.distributed.process_group_manager import process_group_manager
from tokenspeed.runtime.models import deepseek_v3
from tokenspeed.runtime.models.deepseek_v3 import Eagle3DeepseekV2ForCausalLM
from tokenspeed.runtime.models.gpt_oss import GptOssForCausalLM

HIDDEN, VOCAB, DRAFT_VOCAB, EXPERTS, INNER = 64, 64, 32, 2, 96
ALONE = mapping_of(0, 1)


def gpt_oss():
    config = GptOssConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=1,
        max_position_embeddings=64,
        sliding_window=32,
        layer_types=["full_attention", "full_attention"],
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 2.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        },
    )
    # A group of one rank that nothing sends to.
    groups = {"nccl": {ALONE.attn.tp_group: None}}
    with mock.patch.object(process_group_manager, "_process_groups", groups):
        return built(lambda: GptOssForCausalLM(config, ALONE, None), ALONE)


def gpt_oss_tensors():
    shapes = {
        # Not in the order of their names.
        "model.norm.weight": (HIDDEN,),
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
    }
    for layer in ("model.layers.1", "model.layers.0"):
        attn, mlp = f"{layer}.self_attn", f"{layer}.mlp"
        for name, rows in (("v", 32), ("q", 64), ("k", 32)):
            shapes[f"{attn}.{name}_proj.weight"] = (rows, HIDDEN)
            shapes[f"{attn}.{name}_proj.bias"] = (rows,)
        shapes |= {
            f"{attn}.sinks": (4,),
            f"{attn}.o_proj.weight": (HIDDEN, 64),
            f"{attn}.o_proj.bias": (HIDDEN,),
            f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
            f"{mlp}.router.weight": (EXPERTS, HIDDEN),
            f"{mlp}.router.bias": (EXPERTS,),
            f"{mlp}.experts.gate_up_proj": (EXPERTS, HIDDEN, 2 * INNER),
            f"{mlp}.experts.gate_up_proj_bias": (EXPERTS, 2 * INNER),
            f"{mlp}.experts.down_proj": (EXPERTS, INNER, HIDDEN),
            f"{mlp}.experts.down_proj_bias": (EXPERTS, HIDDEN),
        }
    return {name: random_tensor(name, BF16, shape) for name, shape in shapes.items()}


def eagle3():
    config = PretrainedConfig(
        vocab_size=VOCAB,
        draft_vocab_size=DRAFT_VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=EXPERTS,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
        max_position_embeddings=64,
        hidden_act="silu",
        tie_word_embeddings=False,
    )
    return built(lambda: Eagle3DeepseekV2ForCausalLM(config, ALONE, None), ALONE)


def eagle3_tensors():
    attn, layer = "layers.0.self_attn", "layers.0"
    shapes = {
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "norm.weight": (HIDDEN,),
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        f"{attn}.kv_a_proj_with_mqa.weight": (48, 2 * HIDDEN),
        f"{attn}.q_a_proj.weight": (32, 2 * HIDDEN),
        f"{attn}.q_a_layernorm.weight": (32,),
        f"{attn}.kv_a_layernorm.weight": (32,),
        f"{attn}.q_b_proj.weight": (128, 32),
        f"{attn}.kv_b_proj.weight": (128, 32),
        f"{attn}.o_proj.weight": (HIDDEN, 64),
        f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN),
        f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER),
        f"{layer}.hidden_norm.weight": (HIDDEN,),
        f"{layer}.input_layernorm.weight": (HIDDEN,),
        f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
    }
    tensors = {name: random_tensor(name, BF16, shape) for name, shape in shapes.items()}
    tensors["d2t"] = torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.ones(VOCAB, dtype=torch.bool)
    return tensors


MODELS = ((gpt_oss, gpt_oss_tensors), (eagle3, eagle3_tensors))


class TestStreamedLoadWeights(unittest.TestCase):
    """Needs no GPU."""

    def setUp(self):
        # Asked when the weights are loaded, of the kernel that will use them.
        name = "mla_project_value_prefers_contiguous_weight"
        patch = mock.patch.object(deepseek_v3, name, return_value=False)
        patch.start()
        self.addCleanup(patch.stop)

    def checkpoint(self, tensors):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        # Two shards, so that the order is that of neither names nor shapes.
        names = [*tensors]
        for number, part in enumerate((names[::2], names[1::2])):
            shard = Path(folder.name, f"model-{number}.safetensors")
            save_file({name: tensors[name] for name in part}, shard)
        return folder.name

    @pytest.mark.feature
    def test_no_tensor_is_kept_behind_the_next(self):
        # Turns red when a load holds the checkpoint on the device a second time.
        for make, tensors_of in MODELS:
            with self.subTest(model=make.__name__), tiny_gpu():
                folder, model = self.checkpoint(tensors_of()), make()
                alive, most = weakref.WeakSet(), 0

                def watched(folder=folder, model=model, alive=alive):
                    nonlocal most
                    for name, tensor in weights_of(model, folder):
                        alive.add(tensor)
                        yield name, tensor
                        del tensor
                        most = max(most, len(alive))

                model.load_weights(watched())
                # The iterator's own, and the one that the model looks at.
                self.assertLessEqual(most, 2)

    @pytest.mark.guard(mutation="tensors that come in another order are left out")
    def test_result_does_not_depend_on_the_order(self):
        # Turns red when a parameter misses what came early or late.
        for make, tensors_of in MODELS:
            with self.subTest(model=make.__name__), tiny_gpu():
                tensors = tensors_of()
                streamed, by_name = make(), make()
                streamed.load_weights(weights_of(streamed, self.checkpoint(tensors)))
                by_name.load_weights(sorted(tensors.items()))
                for name, parameter in by_name.named_parameters():
                    other = streamed.get_parameter(name)
                    self.assertEqual(tensor_bytes(other), tensor_bytes(parameter), name)

    @pytest.mark.guard(mutation="what a draft notes while it loads is lost")
    def test_draft_notes_its_vocabulary_and_head(self):
        # Turns red when the draft takes the target's head although it has its own.
        model, tensors = eagle3(), eagle3_tensors()
        with tiny_gpu():
            model.load_weights(weights_of(model, self.checkpoint(tensors)))
        expected = 2 * torch.arange(DRAFT_VOCAB)
        self.assertTrue(torch.equal(model.get_hot_token_id(), expected))
        self.assertFalse(model.load_lm_head_from_target)
        self.assertTrue(model._embed_loaded_from_checkpoint)


if __name__ == "__main__":
    unittest.main()
