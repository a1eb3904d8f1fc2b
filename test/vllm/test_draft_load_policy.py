# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which loader a draft gets beside a target that InstantTensor loads."""

import copy
import dataclasses
import logging
import os
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from tiny_vllm_configs import (
    engine_config,
    write_model,
)

from vllm.config import LoadConfig
from vllm.model_executor.model_loader import default_loader, weight_utils
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.utils import get_draft_load_config
from vllm.v1.spec_decode import draft_model, llm_base_proposer
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker.gpu.spec_decode import utils as spec_decode_utils
from vllm.v1.worker.gpu.spec_decode.dflash import utils as dflash_utils
from vllm.v1.worker.gpu.spec_decode.dspark import utils as dspark_utils
from vllm.v1.worker.gpu.spec_decode.eagle import utils as eagle_utils
from vllm.v1.worker.gpu.spec_decode.gemma4 import speculator as gemma4
from vllm.v1.worker.gpu.spec_decode.standalone_ar import speculator as standalone_ar

MODE = "INSTANTTENSOR_DRAFT_LOADER"

# Method: the target, and the draft that lies in a folder of its own.
METHODS = {
    "mtp": ("mimo", "mimo"),
    "eagle": ("llama", "llama"),
    "dspark": ("deepseek_v41", "qwen3_dspark"),
    "draft_model": ("llama", "qwen3"),
    "ngram": ("llama", None),
}

# What the draft gets, by mode and checkpoint, where nothing is said explicitly.
LAZY, TARGETS = "lazy safetensors", "the target's"
POLICY = {
    ("auto", "same"): LAZY,
    ("auto", "different"): TARGETS,
    ("safetensors", "same"): LAZY,
    ("safetensors", "different"): LAZY,
    ("instanttensor", "same"): TARGETS,
    ("instanttensor", "different"): TARGETS,
}


def expected(mode, checkpoint, method):
    if method == "ngram":
        return TARGETS
    if (mode, checkpoint, method) == ("auto", "same", "dspark"):
        return TARGETS  # DeepSeek's draft declares its weights.
    return POLICY[mode, checkpoint]


CASES = [(m, c, n) for m, c in POLICY for n in METHODS]
CHANGED = [case for case in CASES if expected(*case) == LAZY]
UNCHANGED = [case for case in CASES if expected(*case) == TARGETS]


def instanttensor(**extra):
    return LoadConfig(
        load_format="instanttensor",
        model_loader_extra_config={"enable_weights_track": True, **extra},
    )


def config_for(tmp_path, checkpoint, method, load_config=None, **more):
    target, draft = METHODS[method]
    folder = write_model(tmp_path / "target", target)
    speculative = {"method": method, **more}
    if method in ("eagle", "draft_model"):
        speculative["model"] = folder
    if checkpoint == "different" and draft is not None:
        speculative["model"] = write_model(tmp_path / "draft", draft)
    return engine_config(folder, load_config or instanttensor(), **speculative)


def in_mode(mode):
    return mock.patch.dict(os.environ, {MODE: mode})


@pytest.fixture(autouse=True)
def no_mode():
    with mock.patch.dict(os.environ):
        os.environ.pop(MODE, None)
        yield


def assert_lazy(load_config, target):
    """The target's configuration, but for what makes it lazy safetensors."""
    assert load_config is not target
    assert load_config.load_format == "safetensors"
    assert load_config.safetensors_load_strategy == "lazy"
    same = [f.name for f in dataclasses.fields(LoadConfig)]
    for name in ("load_format", "safetensors_load_strategy"):
        same.remove(name)
    for name in same:
        assert getattr(load_config, name) == getattr(target, name)


class TestMatrix:
    @pytest.mark.feature
    @pytest.mark.parametrize(("mode", "checkpoint", "method"), CHANGED)
    def test_draft_loads_by_lazy_safetensors(self, tmp_path, mode, checkpoint, method):
        """Red when a draft that InstantTensor would read whole is left to it."""
        config = config_for(tmp_path, checkpoint, method)
        with in_mode(mode):
            load_config = get_draft_load_config(config)
        assert_lazy(load_config, config.load_config)

    @pytest.mark.guard(mutation="the policy gives every draft lazy safetensors")
    @pytest.mark.parametrize(("mode", "checkpoint", "method"), UNCHANGED)
    def test_draft_keeps_the_targets_loader(self, tmp_path, mode, checkpoint, method):
        """Red when a draft loses InstantTensor that gains by it, or ngram is one."""
        config = config_for(tmp_path, checkpoint, method)
        with in_mode(mode):
            assert get_draft_load_config(config) is config.load_config

    @pytest.mark.guard(mutation="the policy overrides draft_load_config")
    @pytest.mark.parametrize("load_format", ["auto", "instanttensor"])
    @pytest.mark.parametrize(("mode", "checkpoint", "method"), CASES)
    def test_explicit_config_is_preserved(
        self, tmp_path, mode, checkpoint, method, load_format
    ):
        """Red when what the user said about the draft is overruled."""
        explicit = LoadConfig(load_format=load_format)
        config = config_for(tmp_path, checkpoint, method, draft_load_config=explicit)
        with in_mode(mode):
            assert get_draft_load_config(config) is explicit

    @pytest.mark.guard(mutation="the policy looks only at the draft")
    @pytest.mark.parametrize("load_format", ["auto", "safetensors", "fastsafetensors"])
    @pytest.mark.parametrize(("mode", "checkpoint", "method"), CASES)
    def test_nothing_happens_without_instanttensor(
        self, tmp_path, mode, checkpoint, method, load_format
    ):
        """Red when another load format of the target is touched."""
        target = LoadConfig(load_format=load_format)
        config = config_for(tmp_path, checkpoint, method, target)
        with in_mode(mode):
            assert get_draft_load_config(config) is target

    @pytest.mark.guard(mutation="a target without a draft is asked for its draft")
    def test_nothing_happens_without_speculation(self, tmp_path):
        """Red when an engine without speculation needs a draft."""
        config = config_for(tmp_path, "same", "ngram")
        config.speculative_config = None
        assert get_draft_load_config(config) is config.load_config

    @pytest.mark.feature
    def test_auto_is_the_default(self, tmp_path):
        """Red when drafts are left alone unless a mode is set."""
        config = config_for(tmp_path, "same", "mtp")
        assert_lazy(get_draft_load_config(config), config.load_config)

    @pytest.mark.guard(mutation="a draft that declares its weights loads lazily")
    def test_draft_that_declares_its_weights_keeps_instanttensor(self, tmp_path):
        """Red when upstream's own declarations are overlooked."""
        folder = write_model(tmp_path, "qwen3_next")
        config = engine_config(folder, instanttensor(), method="mtp")
        assert get_draft_load_config(config) is config.load_config

    @pytest.mark.feature
    def test_inherited_default_of_the_protocol_declares_nothing(self, tmp_path):
        """Red when VllmModel's own method, which wants all, counts as declared."""
        from vllm.model_executor.models.interfaces_base import VllmModel
        from vllm.model_executor.models.mimo_mtp import MiMoMTP

        config = config_for(tmp_path, "same", "mtp")
        default = VllmModel.is_unused_checkpoint_weight
        with mock.patch.object(
            MiMoMTP, "is_unused_checkpoint_weight", default, create=True
        ):
            assert_lazy(get_draft_load_config(config), config.load_config)

    @pytest.mark.guard(mutation="the disable switch is not looked at")
    def test_disabled_is_stock(self, tmp_path):
        """Red when LOADPLAN_DISABLE no longer gives vLLM's own behaviour."""
        config = config_for(tmp_path, "same", "mtp")
        with mock.patch.dict(os.environ, {"LOADPLAN_DISABLE": "1"}):
            assert get_draft_load_config(config) is config.load_config

    @pytest.mark.feature
    @pytest.mark.parametrize("mode", ["auto", "instanttensor"])
    @pytest.mark.parametrize("checkpoint", ["same", "different"])
    @pytest.mark.parametrize("method", ["mtp", "dspark"])
    def test_draft_of_one_pipeline_stage_never_reads_collectively(
        self, tmp_path, mode, checkpoint, method
    ):
        """Red when the stage with the draft waits for stages without one."""
        config = config_for(tmp_path, checkpoint, method)
        config.parallel_config.pipeline_parallel_size = 2
        with in_mode(mode):
            assert_lazy(get_draft_load_config(config), config.load_config)


class TestSameCheckpoint:
    """Paths by what they lead to, hub names by name and revision."""

    @pytest.mark.feature
    def test_link_to_the_targets_folder_is_the_same(self, tmp_path):
        """Red when paths are compared as they are spelled."""
        folder = write_model(tmp_path / "target", "llama")
        (tmp_path / "link").symlink_to(folder)
        config = engine_config(
            folder, instanttensor(), method="eagle", model=f"{tmp_path}/link/."
        )
        assert_lazy(get_draft_load_config(config), config.load_config)

    @pytest.mark.guard(mutation="folders are compared by their content")
    def test_copy_of_the_targets_folder_is_another(self, tmp_path):
        """Red when a draft's own checkpoint loses InstantTensor."""
        config = config_for(tmp_path, "different", "eagle")
        assert get_draft_load_config(config) is config.load_config

    def hub_config(self, tmp_path, *, draft, target):
        """A draft and a target as (name, revision) on the hub."""
        config = config_for(tmp_path, "same", "mtp")
        configs = config.speculative_config
        models = (configs.draft_model_config, configs.target_model_config)
        for model_config, (name, revision) in zip(models, (draft, target), strict=True):
            model_config.model, model_config.revision = name, revision
        return config

    @pytest.mark.feature
    @pytest.mark.parametrize("revision", ["abc", None])
    def test_revision_that_was_not_passed_on_is_the_same(self, tmp_path, revision):
        """Red when --revision alone makes a draft of the same name another one."""
        for target in ("abc", revision):
            config = self.hub_config(
                tmp_path, draft=("org/m", revision), target=("org/m", target)
            )
            assert_lazy(get_draft_load_config(config), config.load_config)

    @pytest.mark.guard(mutation="hub names are compared without their revisions")
    @pytest.mark.parametrize(
        "draft", [("org/m", "def"), ("org/draft", "abc"), ("org/draft", None)]
    )
    def test_other_name_or_revision_is_another(self, tmp_path, draft):
        """Red when a draft from elsewhere is taken for the target's."""
        config = self.hub_config(tmp_path, draft=draft, target=("org/m", "abc"))
        assert get_draft_load_config(config) is config.load_config


class TestLazy:
    @pytest.mark.feature
    def test_multithread_options_are_dropped_and_the_targets_kept(self, tmp_path):
        """Red when an inherited option bypasses "lazy", or the target's is changed."""
        target = instanttensor(enable_multithread_load=True, num_threads=3)
        target.safetensors_load_strategy = "lazy"
        before = copy.deepcopy(target)
        config = config_for(tmp_path, "same", "mtp", target)
        load_config = get_draft_load_config(config)
        assert load_config.model_loader_extra_config == {"enable_weights_track": True}
        assert config.load_config is target and target == before
        load_config.model_loader_extra_config["added"] = True
        assert target == before

    @pytest.mark.feature
    def test_files_on_network_storage_are_not_read_whole(self, tmp_path):
        """Red when "lazy" is left to vLLM's guess, which prefetches there."""
        config = config_for(
            tmp_path, "same", "mtp", instanttensor(enable_multithread_load=True)
        )
        save_file(
            {"a": torch.ones(4)},
            tmp_path / "target" / "model.safetensors",
            metadata={"format": "pt"},
        )
        loader = DefaultModelLoader(get_draft_load_config(config))
        draft = config.speculative_config.draft_model_config
        with (
            mock.patch.object(weight_utils, "_get_fs_type", lambda files: "nfs"),
            mock.patch.object(weight_utils, "_prefetch_all_checkpoints") as prefetch,
            mock.patch.object(
                default_loader, "multi_thread_safetensors_weights_iterator"
            ) as threads,
            mock.patch.object(
                default_loader, "instanttensor_weights_iterator"
            ) as collective,
        ):
            list(loader.get_all_weights(draft, torch.nn.Module()))
        used = [m.called for m in (prefetch, threads, collective)]
        assert used == [False, False, False]


class TestMessages:
    @pytest.mark.feature
    @pytest.mark.parametrize("explicit", [None, "auto"])
    @pytest.mark.parametrize("mode", ["", "sefetensors", "AUTO"])
    def test_wrong_mode_is_an_error(self, tmp_path, mode, explicit):
        """Red when a misspelt mode silently gives the default."""
        more = (
            {"draft_load_config": LoadConfig(load_format=explicit)} if explicit else {}
        )
        config = config_for(tmp_path, "same", "mtp", **more)
        message = ""
        with in_mode(mode):
            try:
                get_draft_load_config(config)
            except ValueError as error:
                message = str(error)
        assert message == (
            f"{MODE} is {mode!r}, expected one of auto, safetensors, instanttensor"
        )

    @pytest.mark.guard(mutation="the mode is checked before there is a draft")
    def test_wrong_mode_does_not_matter_without_a_draft(self, tmp_path):
        """Red when a left-over variable stops an engine that has no use for it."""
        config = config_for(tmp_path, "same", "ngram")
        with in_mode("nonsense"):
            assert get_draft_load_config(config) is config.load_config

    @pytest.mark.feature
    @pytest.mark.parametrize(
        ("mode", "checkpoint", "explicit", "loader", "reason"),
        [
            ("auto", "same", None, "lazy safetensors", "declares no weights"),
            ("auto", "different", None, "instanttensor", "checkpoint of its own"),
            ("safetensors", "different", None, "lazy safetensors", "every draft"),
            ("instanttensor", "same", None, "instanttensor", "left alone"),
            ("auto", "same", "pt", "pt", "draft_load_config is set"),
        ],
    )
    def test_one_line_tells_loader_and_reason(
        self, tmp_path, mode, checkpoint, explicit, loader, reason
    ):
        """Red when the log does not say which loader the draft got, or why."""
        more = (
            {"draft_load_config": LoadConfig(load_format=explicit)} if explicit else {}
        )
        config = config_for(tmp_path, checkpoint, "mtp", **more)
        lines = []
        handler = logging.Handler()
        handler.emit = lambda record: lines.append(record.getMessage())
        logging.getLogger("vllm").addHandler(handler)
        try:
            with in_mode(mode):
                get_draft_load_config(config)
        finally:
            logging.getLogger("vllm").removeHandler(handler)
        draft = config.speculative_config.draft_model_config.model
        (line,) = [line for line in lines if MODE in line] or [""]
        assert f"{draft} loads by {loader} ({MODE}={mode}: " in line
        assert reason in line
        assert "InstantTensor is preserved for the target" in line


class Loaded(Exception):
    """A draft would be loaded now."""


def load_config_of(module, load):
    """The load config with which ``load`` has ``module`` load its model."""

    def get_model(*, vllm_config, model_config=None, prefix="", load_config=None):
        raise Loaded(load_config or vllm_config.load_config)

    with mock.patch.object(module, "get_model", get_model), pytest.raises(Loaded) as e:
        load()
    return e.value.args[0]


def proposer(cls, config):
    """A proposer or speculator without the buffers that need a device."""
    made = object.__new__(cls)
    torch.nn.Module.__init__(made) if isinstance(made, torch.nn.Module) else None
    made.vllm_config = config
    made.speculative_config = config.speculative_config
    made.draft_model_config = config.speculative_config.draft_model_config
    return made


def v1_base(config):
    made = proposer(SpecDecodeBaseProposer, config)
    return load_config_of(llm_base_proposer, made._get_model)


def v1_draft_model(config):
    made = proposer(DraftModelProposer, config)
    return load_config_of(draft_model, made._get_model)


def v2_draft_model(config):
    made = proposer(standalone_ar.StandaloneARSpeculator, config)
    return load_config_of(standalone_ar, lambda: made.load_draft_model(None, set()))


def v2_gemma4(config):
    made = proposer(gemma4.Gemma4Speculator, config)
    return load_config_of(gemma4, lambda: made.load_draft_model(None, set()))


def v2_eagle(config):
    return load_config_of(
        eagle_utils, lambda: eagle_utils.load_eagle_model(None, config)
    )


def v2_dflash(config):
    return load_config_of(
        dflash_utils, lambda: dflash_utils.load_dflash_model(None, config)
    )


def v2_dspark(config):
    from vllm.model_executor import model_loader

    return load_config_of(
        model_loader, lambda: dspark_utils.load_dspark_model(None, config)
    )


CALLERS = [v1_base, v2_eagle, v2_dflash, v2_dspark, v2_gemma4]
DRAFT_MODEL_CALLERS = [v1_draft_model, v2_draft_model]


@pytest.fixture
def one_stage():
    group = SimpleNamespace(world_size=1)
    with mock.patch.object(spec_decode_utils, "get_pp_group", lambda: group):
        yield group


class TestCallers:
    """Every place that loads a draft asks for its load config."""

    @pytest.mark.feature
    @pytest.mark.parametrize("caller", CALLERS + DRAFT_MODEL_CALLERS)
    def test_draft_is_loaded_by_the_policy(self, tmp_path, one_stage, caller):
        """Red when a caller passes the policy by."""
        method = "draft_model" if caller in DRAFT_MODEL_CALLERS else "mtp"
        config = config_for(tmp_path, "same", method)
        assert_lazy(caller(config), config.load_config)
        assert config.load_config.load_format == "instanttensor"

    @pytest.mark.feature
    @pytest.mark.parametrize("caller", DRAFT_MODEL_CALLERS)
    def test_explicit_config_reaches_a_draft_model(self, tmp_path, one_stage, caller):
        """Red when draft_load_config is ignored for method draft_model again."""
        explicit = LoadConfig(load_format="safetensors")
        for target in ("auto", "instanttensor"):
            config = config_for(
                tmp_path,
                "different",
                "draft_model",
                LoadConfig(load_format=target),
                draft_load_config=explicit,
            )
            assert caller(config) is explicit

    @pytest.mark.guard(mutation="draft models get a load config of their own making")
    @pytest.mark.parametrize("caller", CALLERS + DRAFT_MODEL_CALLERS)
    @pytest.mark.parametrize("load_format", ["auto", "instanttensor"])
    def test_draft_with_its_own_checkpoint_loads_like_the_target(
        self, tmp_path, one_stage, caller, load_format
    ):
        """Red when a draft loses the target's options."""
        method = "draft_model" if caller in DRAFT_MODEL_CALLERS else "mtp"
        target = LoadConfig(load_format=load_format)
        config = config_for(tmp_path, "different", method, target)
        assert caller(config) is target

    @pytest.mark.guard(mutation="the pipeline-safe choice is left out at a caller")
    @pytest.mark.parametrize("caller", [v2_eagle, v2_dflash, v2_dspark])
    def test_pipeline_safe_choice_stays(self, tmp_path, one_stage, caller):
        """Red when fastsafetensors waits for stages that have no draft."""
        one_stage.world_size = 2
        target = LoadConfig(load_format="fastsafetensors")
        config = config_for(tmp_path, "same", "mtp", target)
        assert caller(config).load_format == "auto"

    @pytest.mark.feature
    def test_pipeline_safe_choice_holds_for_a_draft_model(self, tmp_path, one_stage):
        """Red when a draft model's own fastsafetensors waits for other stages."""
        one_stage.world_size = 2
        config = config_for(
            tmp_path,
            "different",
            "draft_model",
            draft_load_config=LoadConfig(load_format="fastsafetensors"),
        )
        assert v2_draft_model(config).load_format == "auto"
