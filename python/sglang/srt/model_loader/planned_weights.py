# SPDX-License-Identifier: Apache-2.0

"""Weights under --load-format instanttensor, each tensor sent where it will live.

InstantTensor streams whole files to the device. A plan made from the headers keeps it
for the files that go there whole; host-resident weights stay lazy CPU tensors and the
rest of their files is read tensor by tensor.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING, Callable, Iterator, List, Optional, Tuple

import torch

from sglang.srt.layers.engram_config import resolve_engram_tables
from sglang.srt.model_loader.loadplan import (
    VERSION,
    LoadPlan,
    LoadPlanError,
    Route,
    make_plan,
    read_headers,
    read_index,
    run_plan,
)
from sglang.srt.platforms import current_platform
from sglang.srt.utils import get_bool_env_var

if TYPE_CHECKING:
    from sglang.srt.configs.load_config import LoadGroup
    from sglang.srt.model_loader.loader import DefaultModelLoader

logger = logging.getLogger(__name__)

# What the plan decides itself; InstantTensor takes everything else as it is given.
_RESERVED_OPTIONS = ("copy", "process_group", "tensor_filter")

_ENGRAM_TABLES = (".engram.embed.weight", ".engram.embed.scale")


def planned_weights_iterator(
    hf_weights_files: List[str],
    *,
    hf_folder: str,
    source: DefaultModelLoader.Source,
    stream_weights: Callable[..., Iterator[Tuple[str, torch.Tensor]]],
    extra_config: Optional[dict],
    load_group: LoadGroup,
) -> Iterator[Tuple[str, torch.Tensor]]:
    """Iterate over the weights of `source`; whole files go through `stream_weights`."""

    def stream_files(files: List[str]) -> Iterator[Tuple[str, torch.Tensor]]:
        return stream_weights(files, extra_config=extra_config, load_group=load_group)

    if get_bool_env_var("LOADPLAN_DISABLE") or _is_refused(hf_weights_files):
        yield from stream_files(hf_weights_files)
        return

    reserved = sorted(set(_RESERVED_OPTIONS).intersection(extra_config or ()))
    if reserved:
        raise ValueError(
            f"--model-loader-extra-config sets {reserved} for InstantTensor, which "
            "SGLang decides from the checkpoint and the model; remove them"
        )
    plan = plan_weights(hf_weights_files, hf_folder=hf_folder, source=source)
    _log_plan(plan)
    yield from run_plan(
        plan,
        stream_files=stream_files,
        device=current_platform.get_device(torch.cuda.current_device()),
    )


def plan_weights(
    hf_weights_files: List[str],
    *,
    hf_folder: str,
    source: DefaultModelLoader.Source,
) -> LoadPlan:
    """Decide from the headers where each tensor of `source` goes."""
    plan = make_plan(
        read_headers(hf_weights_files),
        weight_map=read_index(hf_folder),
        host_resident_weight_patterns=source.host_resident_weight_patterns or (),
    )
    if resolve_engram_tables().host_layout is not None:
        for entry in plan.entries:
            if entry.route in (Route.READ, Route.STREAM) and entry.tensor.name.endswith(
                _ENGRAM_TABLES
            ):
                raise LoadPlanError(
                    f"{entry.file.path}: tensor {entry.tensor.name!r} is planned for "
                    "the device, but the Engram tables are placed on the host; the "
                    "model must declare it in host_resident_weight_patterns"
                )
    return plan


def _is_refused(hf_weights_files: List[str]) -> bool:
    """Whether the format's own iterator refuses before it opens a file."""
    if current_platform.device_type != "cuda":
        return True
    if not all(file.endswith(".safetensors") for file in hf_weights_files):
        return True
    try:
        importlib.import_module("instanttensor")
    except ImportError:
        return True
    return False


def _log_plan(plan: LoadPlan) -> None:
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return
    stream = plan.totals()[Route.STREAM]
    logger.info(
        "This SGLang is patched by loadplan %s (LOADPLAN_DISABLE=1 turns it off): "
        "InstantTensor streams %d files, %d tensors, %.2f GiB.",
        VERSION,
        stream.files,
        stream.tensors,
        stream.nbytes / 2**30,
    )
    for (route, reason), total in plan.departures().items():
        logger.info(
            "loadplan: %s %d tensors of %d files, %.2f GiB: %s",
            route.value,
            total.tensors,
            total.files,
            total.nbytes / 2**30,
            reason,
        )
