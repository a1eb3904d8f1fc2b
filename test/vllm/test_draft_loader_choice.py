# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which loader a draft gets beside a target that InstantTensor loads."""

import os
from types import SimpleNamespace
from unittest import mock

import pytest

from vllm.config import LoadConfig
from vllm.model_executor.model_loader import utils
from vllm.v1.spec_decode import draft_model
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

MODE = "INSTANTTENSOR_DRAFT_LOADER"


class DeclaringDraft:
    def is_unused_checkpoint_weight(self, name):
        return False


@pytest.fixture(autouse=True)
def draft_class(monkeypatch):
    monkeypatch.delenv(MODE, raising=False)
    monkeypatch.setattr(utils, "get_model_cls", lambda config: config.cls)


def engine(*, own=False, explicit=None, stages=1, cls=object):
    """A target with a draft from its checkpoint, or with one of its own."""
    target, draft = (
        SimpleNamespace(model=model, revision=None, cls=cls)
        for model in ("org/target", "org/draft" if own else "org/target")
    )
    return SimpleNamespace(
        load_config=LoadConfig(
            load_format="instanttensor",
            model_loader_extra_config={"enable_weights_track": True},
        ),
        parallel_config=SimpleNamespace(pipeline_parallel_size=stages, rank=0),
        speculative_config=SimpleNamespace(
            target_model_config=target,
            draft_model_config=draft,
            draft_load_config=explicit,
            draft_parallel_config=None,
        ),
    )


def assert_lazy(chosen):
    assert chosen.load_format == "safetensors"
    assert chosen.safetensors_load_strategy == "lazy"
    assert chosen.model_loader_extra_config == {"enable_weights_track": True}


@pytest.mark.feature
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("auto", {}),
        ("safetensors", {}),
        ("safetensors", {"own": True}),
        ("instanttensor", {"stages": 2, "cls": DeclaringDraft}),
    ],
)
def test_draft_that_would_read_the_whole_checkpoint_loads_lazily(mode, options):
    # Turns red when InstantTensor reads a checkpoint whole for a few tensors, or
    # waits for pipeline stages without a draft.
    with mock.patch.dict(os.environ, {MODE: mode}):
        assert_lazy(utils.get_draft_load_config(engine(**options)))


@pytest.mark.feature
def test_unknown_mode_is_an_error():
    # Turns red when a typing error silently leaves drafts alone.
    with mock.patch.dict(os.environ, {MODE: "lazy"}):
        with pytest.raises(ValueError, match=f"{MODE} is 'lazy', expected one of"):
            utils.get_draft_load_config(engine())


@pytest.mark.guard(mutation="every draft loads lazily")
@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("auto", {"own": True}),
        ("auto", {"cls": DeclaringDraft}),
        ("instanttensor", {}),
    ],
)
def test_draft_that_gains_by_instanttensor_keeps_it(mode, options):
    # Turns red when a draft loses the loader that reads just its weights.
    config = engine(**options)
    with mock.patch.dict(os.environ, {MODE: mode}):
        assert utils.get_draft_load_config(config) is config.load_config


@pytest.mark.guard(mutation="the policy overrides draft_load_config")
def test_explicit_config_wins():
    # Turns red when what the user said about the draft is overruled.
    explicit = LoadConfig(load_format="auto")
    assert utils.get_draft_load_config(engine(explicit=explicit)) is explicit


@pytest.mark.feature
def test_draft_model_is_loaded_by_the_policy(monkeypatch):
    # Turns red when method draft_model takes the target's loader whatever is said.
    made = object.__new__(draft_model.DraftModelProposer)
    base = engine()
    base.parallel_config = mock.MagicMock(pipeline_parallel_size=1)
    made.speculative_config = base.speculative_config
    monkeypatch.setattr(
        SpecDecodeBaseProposer, "_create_draft_vllm_config", lambda self: base
    )
    monkeypatch.setattr(draft_model, "replace", lambda config, **changes: changes)
    changes = made._create_draft_vllm_config()
    assert "load_config" in changes
    assert_lazy(changes["load_config"])
