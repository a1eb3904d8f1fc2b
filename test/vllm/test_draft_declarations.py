# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Drafts that lie in their target's checkpoint declare what they do not load.

The models are not built, because their kernels need a device: naming rules need none.
"""

from types import SimpleNamespace

import pytest
import torch
from small_vllm_loads import SmallLoads, exact, tensors_of

from vllm.models.deepseek_v4.nvidia.dspark import DSparkDeepseekV4ForCausalLM
from vllm.models.deepseek_v41.nvidia.dspark import (
    DSparkDeepseekV4ForCausalLM as DSparkDeepseekV41ForCausalLM,
)
from vllm.models.qwen4_exp.nvidia.mtp import Qwen4ExpMTP, _remap_mtp_weight_name

DSPARKS = [DSparkDeepseekV4ForCausalLM, DSparkDeepseekV41ForCausalLM]
DRAFTS = [*DSPARKS, Qwen4ExpMTP]
# What each class loads, and what is only its target's.
OWN = ["mtp.0.norm.weight", "mtp.1.ffn.experts.3.w1.scale"]
TARGETS = ["layers.0.attn.wq_a.weight", "layers.2.ffn.experts.1.w2.weight"]
OTHERS = [
    "mtp.2.confidence_head.proj.weight",
    "embed.weight",
    "model.language_model.embed_tokens.weight",
    "lm_head.weight",
    "model.visual.blocks.0.attn.qkv.weight",
]


def draft(cls, *, confidence_head=True):
    """A draft with nothing but what its own naming rule asks for."""
    made = object.__new__(cls)
    torch.nn.Module.__init__(made)
    head = object() if confidence_head else None
    made.__dict__["model"] = SimpleNamespace(confidence_head=head)
    return made


class TestDraftDeclarations(SmallLoads):
    @pytest.mark.feature
    @pytest.mark.parametrize("cls", DRAFTS)
    def test_file_without_a_weight_of_the_draft_is_not_read(self, cls):
        # Turns red when a draft reads its target's files, or loses one of its own.
        self.write(a=tensors_of(*TARGETS))
        expected = self.write(b=tensors_of(*OWN))
        assert exact(self.load(model=draft(cls))) == expected
        assert self.seen.streamed == ["b.safetensors"]

    @pytest.mark.feature
    @pytest.mark.parametrize("confidence_head", [True, False])
    @pytest.mark.parametrize("cls", DRAFTS)
    def test_declaration_is_the_rule_of_load_weights(self, cls, confidence_head):
        # Turns red when a name that load_weights maps is declared unused, or one
        # that it drops is not.
        made = draft(cls, confidence_head=confidence_head)
        is_unused = getattr(made, "is_unused_checkpoint_weight", lambda name: None)
        remap = getattr(made, "_remap_dspark_name", _remap_mtp_weight_name)
        for name in (*OWN, *TARGETS, *OTHERS):
            assert is_unused(name) is (remap(name) is None), name

    @pytest.mark.guard(mutation="a draft's files are chosen by something else")
    @pytest.mark.parametrize("cls", DRAFTS)
    def test_files_of_the_draft_alone_are_one_call(self, cls):
        # Turns red when a draft's own checkpoint is read in parts.
        expected = self.write(a=tensors_of(OWN[0]), b=tensors_of(OWN[1]))
        assert exact(self.load(model=draft(cls))) == expected
        (call,) = self.seen.calls
        assert len(call.files) == 2
