# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Drafts that read only their own tensors of the target's checkpoint.

Each draft class's own rule decides, through the released DefaultModelLoader; the models
are not built, because their kernels need a device.
"""

import json
import struct
from types import SimpleNamespace

import pytest
import torch
from tiny_vllm_checkpoints import (
    DENSE,
    TABLE,
    load,
    nbytes,
    write_checkpoint,
)

from vllm.model_executor.models.qwen3_next_mtp import Qwen3NextMTP
from vllm.models.deepseek_v4.nvidia.dspark import DSparkDeepseekV4ForCausalLM
from vllm.models.deepseek_v41.nvidia.dspark import (
    DSparkDeepseekV4ForCausalLM as DSparkDeepseekV41ForCausalLM,
)
from vllm.models.qwen4_exp.nvidia.mtp import Qwen4ExpMTP, _remap_mtp_weight_name

TARGETS_OWN = [DENSE, TABLE, "layers.2.ffn.experts.1.w2.weight"]
DSPARK_OWN = [
    "mtp.0.main_proj.weight",
    "mtp.0.attn.wkv.weight",
    "mtp.1.ffn.experts.3.w1.scale",
    "mtp.2.norm.weight",
    "mtp.2.markov_head.markov_w1.weight",
    "mtp.2.confidence_head.proj.weight",
]
# Names that Qwen4Exp's checkpoints and their conversions have for the draft's tensors.
QWEN4_EXP_OWN = [
    "mtp.layers.0.mlp.experts.2.up_proj.weight",
    "model.mtp.fc.weight",
    "model.language_model.embed_tokens.weight",
    "language_model.model.embed_tokens.weight",
    "lm_head.weight",
]
QWEN4_EXP_TARGETS = [
    "model.language_model.layers.0.mlp.gate.weight",
    "model.visual.blocks.0.attn.qkv.weight",
    "model.layers.0.ple.ple_embedding.ngram_embedding.shard_0.weight",
]


def draft(cls, *, confidence_head=True):
    """A draft of a class, with what its own naming rule asks for."""
    made = object.__new__(cls)
    torch.nn.Module.__init__(made)
    head = object() if confidence_head else None
    made.__dict__["model"] = SimpleNamespace(confidence_head=head)
    return made


DRAFTS = {
    "dspark_v4": (DSparkDeepseekV4ForCausalLM, DSPARK_OWN, TARGETS_OWN),
    "dspark_v41": (DSparkDeepseekV41ForCausalLM, DSPARK_OWN, TARGETS_OWN),
    "qwen4_exp": (Qwen4ExpMTP, QWEN4_EXP_OWN, QWEN4_EXP_TARGETS),
}


@pytest.mark.feature
@pytest.mark.parametrize("kind", DRAFTS)
def test_draft_reads_its_own_tensors_of_a_shared_file(tmp_path, kind):
    """Red when a draft reads its target's tensors, or loses one of its own."""
    cls, own, others = DRAFTS[kind]
    expected = write_checkpoint(
        tmp_path, a=others[:1], b=[*own[:2], *others], c=others[1:2], d=own[2:]
    )
    got = load(tmp_path, model=draft(cls))
    assert got.tensors == {name: expected[name] for name in own}
    assert len(got.names) == len(own) and got.on_device == set(own)
    # What shares a file is read alone; a file of its own is streamed whole.
    assert got.read == nbytes(*own[:2])
    assert [call.files for call in got.calls] == [["d.safetensors"]]
    assert got.streamed == nbytes(*own[2:])


@pytest.mark.feature
@pytest.mark.parametrize(
    "cls", [DSparkDeepseekV4ForCausalLM, DSparkDeepseekV41ForCausalLM]
)
def test_dspark_without_confidence_head_does_not_read_one(tmp_path, cls):
    """Red when the declaration is another rule than that of load_weights."""
    write_checkpoint(tmp_path, a=[*DSPARK_OWN, DENSE])
    got = load(tmp_path, model=draft(cls, confidence_head=False))
    assert set(got.names) == {n for n in DSPARK_OWN if "confidence" not in n}


@pytest.mark.feature
@pytest.mark.parametrize("kind", DRAFTS)
def test_declaration_is_the_rule_of_load_weights(kind):
    """Red when a name that load_weights maps is declared unused, or one it drops."""
    cls, own, others = DRAFTS[kind]
    made = draft(cls)
    is_unused = getattr(made, "is_unused_checkpoint_weight", lambda name: None)
    remap = getattr(made, "_remap_dspark_name", _remap_mtp_weight_name)
    names = [*own, *others, "mtp.", "embed.weight", "head.weight", "mtp.0.emb.weight"]
    for name in names:
        assert is_unused(name) is (remap(name) is None), name


@pytest.mark.feature
def test_declarations_of_upstream_select_tensors_too(tmp_path):
    """Red when only whole shards are left out, as before."""
    own = ["mtp.fc.weight", "model.embed_tokens.weight", "lm_head.weight"]
    expected = write_checkpoint(tmp_path, a=[DENSE, *own, TABLE], b=[TABLE + "2"])
    got = load(tmp_path, model=draft(Qwen3NextMTP))
    assert got.tensors == {name: expected[name] for name in own}
    assert got.read == nbytes(*own) and got.calls == []


@pytest.mark.feature
def test_unwanted_tensor_that_no_torch_can_hold_is_not_looked_at(tmp_path):
    """Red when a target's odd tensor kills the draft that has no use for it."""
    name, payload = "mtp.fc.weight", bytes(range(24))
    header = {
        name: {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]},
        "odd": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [24, 27]},
    }
    text = json.dumps(header).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + payload + b"odd")
    try:
        found = load(tmp_path, model=draft(Qwen3NextMTP)).tensors
    except ValueError as error:
        found = str(error)
    assert found == {name: (torch.bfloat16, (3, 4), payload)}


@pytest.mark.feature
def test_draft_that_is_in_no_file_is_an_error(tmp_path):
    """Red when a draft without weights is served as if it had been loaded."""
    write_checkpoint(tmp_path, a=TARGETS_OWN)
    message = ""
    try:
        load(tmp_path, model=draft(DSparkDeepseekV4ForCausalLM))
    except ValueError as error:
        message = str(error)
    assert "is_unused_checkpoint_weight" in message
    assert "a.safetensors" in message


@pytest.mark.guard(mutation="a model that declares nothing reads nothing")
def test_model_that_declares_nothing_reads_everything(tmp_path):
    """Red when a target loses tensors."""
    expected = write_checkpoint(tmp_path, a=[*TARGETS_OWN, *DSPARK_OWN])
    got = load(tmp_path)
    assert got.tensors == expected and got.on_device == set(expected)


@pytest.mark.guard(mutation="the filter is applied to another load format")
def test_lazy_safetensors_still_yields_what_the_draft_asks_for(tmp_path):
    """Red when the safetensors format drops what it has always yielded."""
    expected = write_checkpoint(tmp_path, a=[*TARGETS_OWN, *DSPARK_OWN])
    model = draft(DSparkDeepseekV4ForCausalLM)
    got = load(tmp_path, model=model, load_format="safetensors")
    assert got.tensors == expected
