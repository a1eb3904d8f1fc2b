# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Which loader a speculative draft gets when its target loads by InstantTensor."""

import os

from vllm.config import LoadConfig, ModelConfig, SpeculativeConfig, VllmConfig, replace
from vllm.logger import init_logger
from vllm.model_executor.model_loader.planned_weights import is_disabled
from vllm.model_executor.models.interfaces_base import VllmModel

logger = init_logger(__name__)

DRAFT_LOADER_ENV = "INSTANTTENSOR_DRAFT_LOADER"
_MODES = ("auto", "safetensors", "instanttensor")

# The multi-thread loader reads every tensor whole and bypasses "lazy".
_MULTITHREAD_KEYS = ("enable_multithread_load", "num_threads")


def choose_draft_load_config(vllm_config: VllmConfig) -> LoadConfig | None:
    """Return the draft's load config, None where vLLM's own choice stands."""
    speculative_config = vllm_config.speculative_config
    load_config = vllm_config.load_config
    if load_config is None or load_config.load_format != "instanttensor":
        return None
    if not _has_real_draft(speculative_config) or is_disabled():
        return None
    mode = _mode()
    if speculative_config.draft_load_config is not None:
        chosen, reason = None, "draft_load_config is set"
    elif vllm_config.parallel_config.pipeline_parallel_size > 1:
        # Collective reads would wait for the stages without a draft.
        chosen = _lazy_safetensors(load_config)
        reason = "one pipeline stage alone holds the draft"
    elif mode == "instanttensor":
        chosen, reason = None, "drafts are left alone"
    elif mode == "safetensors":
        chosen, reason = _lazy_safetensors(load_config), "every draft gets it"
    elif not _is_same_checkpoint(speculative_config):
        chosen, reason = None, "the draft has a checkpoint of its own"
    elif _declares_its_weights(speculative_config.draft_model_config):
        chosen, reason = None, "the draft reads only the weights it declares"
    else:
        chosen = _lazy_safetensors(load_config)
        reason = "the draft shares the target's checkpoint and declares no weights"
    draft = chosen or speculative_config.draft_load_config or load_config
    logger.info_once(
        "Draft model %s loads by %s (%s=%s: %s); InstantTensor is preserved for "
        "the target.",
        speculative_config.draft_model_config.model,
        "lazy safetensors" if chosen is not None else draft.load_format,
        DRAFT_LOADER_ENV,
        mode,
        reason,
    )
    return chosen


def _has_real_draft(speculative_config: SpeculativeConfig | None) -> bool:
    # ngram and custom classes put the target's own config there.
    return (
        speculative_config is not None
        and speculative_config.draft_model_config is not None
        and speculative_config.draft_model_config
        is not speculative_config.target_model_config
    )


def _mode() -> str:
    mode = os.environ.get(DRAFT_LOADER_ENV, "auto")
    if mode not in _MODES:
        raise ValueError(
            f"{DRAFT_LOADER_ENV} is {mode!r}, expected one of {', '.join(_MODES)}"
        )
    return mode


def _is_same_checkpoint(speculative_config: SpeculativeConfig) -> bool:
    draft = speculative_config.draft_model_config
    target = speculative_config.target_model_config
    if os.path.isdir(draft.model) and os.path.isdir(target.model):
        return os.path.realpath(draft.model) == os.path.realpath(target.model)
    # vLLM does not pass --revision on to a draft of the same model.
    return draft.model == target.model and draft.revision in (None, target.revision)


def _declares_its_weights(model_config: ModelConfig) -> bool:
    # Imported here because that module imports this one.
    from vllm.model_executor.model_loader.utils import get_model_cls

    default = VllmModel.is_unused_checkpoint_weight
    declared = getattr(
        get_model_cls(model_config), "is_unused_checkpoint_weight", default
    )
    return declared is not default


def _lazy_safetensors(load_config: LoadConfig) -> LoadConfig:
    extra_config = load_config.model_loader_extra_config
    return replace(
        load_config,
        load_format="safetensors",
        # None would prefetch whole files from network storage.
        safetensors_load_strategy="lazy",
        model_loader_extra_config={
            key: value
            for key, value in extra_config.items()
            if key not in _MULTITHREAD_KEYS
        },
    )
