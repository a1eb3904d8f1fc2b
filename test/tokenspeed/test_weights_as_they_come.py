"""Models whose load_weights keeps no tensor behind the one that it looks at.

The models are not built, because their kernels need a device; their own load_weights
runs on the few parameters that are named here.
"""

import unittest
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from loadplan.standin.tokenspeed import Platform  # noqa: F401 (before TokenSpeed)
from tokenspeed.runtime.models.deepseek_v3 import (
    DeepseekV3ForCausalLM,
    Eagle3DeepseekV2ForCausalLM,
)
from tokenspeed.runtime.models.gpt_oss import GptOssForCausalLM

# Not in the order of their names.
NAMES = ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight")


def tensor_of(name):
    return torch.arange(len(name), len(name) + 8, dtype=torch.uint8)


def bare(cls):
    made = object.__new__(cls)
    torch.nn.Module.__init__(made)
    return made


def leaf():
    module = torch.nn.Module()
    empty = torch.zeros(8, dtype=torch.uint8)
    module.weight = torch.nn.Parameter(empty, requires_grad=False)
    return module


def gpt_oss():
    model = bare(GptOssForCausalLM)
    model.config = SimpleNamespace(num_hidden_layers=0, num_local_experts=1)
    model.quant_config = None
    model.mapping = SimpleNamespace(
        rank=0,
        attn=SimpleNamespace(tp_rank=0),
        moe=SimpleNamespace(ep_rank=0, ep_size=1),
    )
    model.model = torch.nn.ModuleDict({"norm": leaf(), "embed_tokens": leaf()})
    model.lm_head = leaf()
    return model


class TestGptOss(unittest.TestCase):
    @pytest.mark.feature
    def test_weight_is_loaded_before_the_next_one_is_asked_for(self):
        # Turns red when a load holds the checkpoint on the device a second time.
        model, loaded = gpt_oss(), []

        def weights():
            for name in NAMES:
                yield name, tensor_of(name)
                parameter = model.get_parameter(name)
                loaded.append(torch.equal(parameter, tensor_of(name)))

        model.load_weights(weights())
        self.assertEqual(loaded, [True] * len(NAMES))

    @pytest.mark.guard(mutation="tensors that come in another order are left out")
    def test_order_does_not_matter(self):
        # Turns red when a parameter misses what came early or late.
        for names in (NAMES, NAMES[::-1]):
            model = gpt_oss()
            model.load_weights((name, tensor_of(name)) for name in names)
            for name in NAMES:
                parameter = model.get_parameter(name)
                self.assertTrue(torch.equal(parameter, tensor_of(name)), name)


class TestEagle3(unittest.TestCase):
    def load(self, names):
        """What the base class gets, and how many were asked for at each of them."""
        asked, taken = [], []

        def weights():
            for name in names:
                asked.append(name)
                yield name, tensor_of(name)

        def load_weights(model, weights):
            for name, tensor in weights:
                taken.append((name, bytes(tensor.numpy()), len(asked)))

        self.model = bare(Eagle3DeepseekV2ForCausalLM)
        with mock.patch.object(DeepseekV3ForCausalLM, "load_weights", load_weights):
            self.model.load_weights(weights())
        return taken

    @pytest.mark.feature
    def test_no_weight_is_kept_behind_the_next(self):
        # Turns red when the renamed weights are collected before one is loaded.
        taken = self.load(["layers.0.fc.weight", "norm.weight", "lm_head.weight"])
        self.assertEqual([count for _, _, count in taken], [1, 2, 3])

    @pytest.mark.guard(mutation="what a draft notes while it loads is lost")
    def test_names_bytes_and_notes_are_those_of_before(self):
        # Turns red when a name changes, or the draft forgets its vocabulary or head.
        names = ["d2t", "t2d", "embed_tokens.weight", "layers.0.fc", "lm_head.weight"]
        taken = {name: content for name, content, _ in self.load(names)}
        renamed = ("model.embed_tokens.weight", "model.midlayer.fc", "lm_head.weight")
        for new, old in zip(renamed, names[2:], strict=True):
            self.assertEqual(taken.pop(new), bytes(tensor_of(old).numpy()))
        self.assertEqual(taken, {})
        expected = tensor_of("d2t") + torch.arange(8)
        self.assertTrue(torch.equal(self.model.hot_token_id, expected))
        self.assertFalse(self.model.load_lm_head_from_target)
        self.assertTrue(self.model._embed_loaded_from_checkpoint)


if __name__ == "__main__":
    unittest.main()
