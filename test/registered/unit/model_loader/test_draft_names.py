"""DeepSeek's drafts tell the loader which weights of a checkpoint are their own."""

import unittest
from types import SimpleNamespace

import pytest
import torch

from sglang.srt.models.deepseek_nextn import DeepseekV3ForCausalLMNextN
from sglang.srt.models.deepseek_v4_dspark import DeepseekV4ForCausalLMDSpark
from sglang.srt.models.deepseek_v4_nextn import DeepseekV4ForCausalLMNextN
from sglang.srt.models.glm5_next_nextn import Glm5NextForConditionalGenerationNextN
from sglang.test.ci.ci_register import register_cpu_ci
from sglang.test.test_utils import CustomTestCase

register_cpu_ci(est_time=12, suite="base-a-test-cpu")


class TestDraftNames(CustomTestCase):
    @pytest.mark.feature
    def test_classes_answer_by_the_rule_of_their_load_weights(self):
        # Turns red when a class no longer declares, or its rule and its names part.
        config = SimpleNamespace(num_hidden_layers=7, num_nextn_predict_layers=1)
        for model_class, own, others in (
            (
                DeepseekV3ForCausalLMNextN,
                ("model.layers.7.eh_proj.weight",),
                ("model.layers.6.mlp.x", "model.layers.7.shared_head.head.weight"),
            ),
            (
                DeepseekV4ForCausalLMNextN,
                ("mtp.0.attn.wq_a.weight", "mtp.0.norm.weight"),
                ("layers.0.attn.wq_a.weight", "mtp.0.emb.tok_emb.weight"),
            ),
            (
                DeepseekV4ForCausalLMDSpark,
                ("mtp.0.attn.wq_a.scale",),
                ("layers.0.attn.wq_a.scale", "mtp.1.confidence_head.proj.weight"),
            ),
        ):
            model = model_class.__new__(model_class)
            torch.nn.Module.__init__(model)
            model.config, model.num_stages = config, 2
            model.confidence_head, model.uses_own_vocab_modules = None, False
            self.assertTrue(hasattr(model, "wanted_weight"), model_class.__name__)
            self.assertEqual([*filter(model.wanted_weight, own + others)], [*own])

    @pytest.mark.guard(mutation="a subclass with its own load_weights inherits a rule")
    def test_draft_with_a_rule_of_its_own_inherits_none(self):
        # Turns red when another draft is filtered by DeepSeek's names.
        draft = Glm5NextForConditionalGenerationNextN
        self.assertIsNone(getattr(draft, "wanted_weight", None))


if __name__ == "__main__":
    unittest.main()
