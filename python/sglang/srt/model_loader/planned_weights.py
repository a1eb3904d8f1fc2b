# SPDX-License-Identifier: Apache-2.0

"""Weights under --load-format instanttensor, each tensor sent where it will live.

InstantTensor streams whole files to the device. A plan made from the headers keeps it
for the files that go there whole; host-resident weights stay lazy CPU tensors and the
rest of their files is read tensor by tensor.
"""

from __future__ import annotations

import logging
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Iterator,
    List,
    Mapping,
    Optional,
    Tuple,
)

import torch

from sglang.srt.configs.load_config import _DEFAULT_LOAD_GROUP, LoadGroup
from sglang.srt.layers.engram_config import engram_host_resident_patterns
from sglang.srt.model_loader.loadplan import VERSION
from sglang.srt.model_loader.loadplan.faults import is_old_reader
from sglang.srt.model_loader.loadplan.header import FileHeader, LoadPlanError
from sglang.srt.model_loader.loadplan.loading import decide_routes, run_load
from sglang.srt.model_loader.loadplan.plan import LoadPlan, Route
from sglang.srt.model_loader.loadplan.ranks import Machine, plan_together
from sglang.srt.model_loader.loadplan.ring import ring_budget, small_io_depth
from sglang.srt.model_loader.loadplan.stream import can_stream, flag, log_plan
from sglang.srt.platforms import current_platform
from sglang.srt.runtime_context import get_model, get_parallel

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from sglang.srt.distributed.parallel_state import GroupCoordinator
    from sglang.srt.model_loader.loader import DefaultModelLoader

logger = logging.getLogger(__name__)

# What the plan decides itself; InstantTensor takes everything else as it is given.
_RESERVED_OPTIONS = ("copy", "process_group", "tensor_filter")

# Wherever these live, their weight loader reads rows and never touches the tensor.
_ENGRAM_TABLES = (".engram.embed.weight", ".engram.embed.scale")


def planned_weights_iterator(
    hf_weights_files: List[str],
    *,
    hf_folder: str,
    source: DefaultModelLoader.Source,
    stream_weights: Callable[..., Iterator[Tuple[str, torch.Tensor]]],
    extra_config: Optional[dict],
    load_group: LoadGroup,
    planner: Optional[Callable[..., LoadPlan]] = None,
) -> Iterator[Tuple[str, torch.Tensor]]:
    """Iterate over the weights of `source`; whole files go through `stream_weights`."""
    options = extra_config or {}
    disabled = flag("LOADPLAN_DISABLE")
    if disabled:
        logger.info("loadplan %s is turned off by LOADPLAN_DISABLE.", VERSION)
    # What the format's own iterator refuses, it refuses before it opens a file.
    on_cuda = current_platform.device_type == "cuda"
    if disabled or not on_cuda or not can_stream(hf_weights_files):
        yield from stream_weights(
            hf_weights_files, extra_config=extra_config, load_group=load_group
        )
        return

    reserved = sorted(set(_RESERVED_OPTIONS).intersection(options))
    if reserved:
        raise ValueError(
            f"--model-loader-extra-config sets {reserved} for InstantTensor, which "
            "SGLang decides from the checkpoint and the model; remove them"
        )
    ranks = _ranks(load_group)
    group = None if ranks is None else ranks.cpu_group
    plan = (planner or plan_weights)(
        hf_weights_files,
        hf_folder=hf_folder,
        source=source,
        options=options,
        group=group,
    )
    log_plan(plan, engine="SGLang", version=VERSION, logger=logger)

    def stream_files(files: List[str]) -> Iterator[Tuple[str, torch.Tensor]]:
        depth = small_io_depth(
            plan.streamed(),
            world_size=1 if ranks is None else ranks.world_size,
            options=options,
        )
        return stream_weights(
            files,
            extra_config=options if depth is None else {**options, "io_depth": depth},
            load_group=load_group,
        )

    yield from run_load(
        plan,
        stream_files=stream_files,
        device=_device(),
        group=group,
        device_group=None if ranks is None else ranks.device_group,
        copied=_is_copied,
    )


def plan_weights(
    hf_weights_files: List[str],
    *,
    hf_folder: str,
    source: DefaultModelLoader.Source,
    options: Mapping[str, Any],
    group: Optional[ProcessGroup],
    wanted_weight: Optional[Callable[[str], bool]] = None,
    check: Optional[Callable[[LoadPlan], None]] = None,
) -> LoadPlan:
    """Decide from the headers where each tensor of `source` goes, on all ranks alike."""

    def machine() -> Machine:
        free_bytes, _ = torch.cuda.mem_get_info(_device())
        return Machine(
            device_budget=ring_budget(free_bytes, options), old_reader=is_old_reader()
        )

    def decide(
        headers: List[FileHeader], index: Optional[Dict[str, str]], allowed: Machine
    ) -> LoadPlan:
        plan = decide_routes(
            headers,
            index,
            allowed,
            host_resident_weight_patterns=source.host_resident_weight_patterns or (),
            wanted_weight=wanted_weight,
        )
        _check_engram_tables(plan)
        if check is not None:
            check(plan)
        return plan

    return plan_together(
        hf_weights_files,
        folder=hf_folder,
        group=group,
        machine=machine,
        decide=decide,
    )


def _is_copied(name: str) -> bool:
    """Whether a weight that stays on the host must not be used through a memory map."""
    return get_model().weight_loader_disable_mmap and not name.endswith(_ENGRAM_TABLES)


def _check_engram_tables(plan: LoadPlan) -> None:
    if engram_host_resident_patterns() is None:
        return
    # The tables themselves: an adapter's weights for them do go to the device.
    for entry in plan.entries:
        on_device = entry.route in (Route.READ, Route.STREAM)
        if on_device and entry.tensor.name.endswith(_ENGRAM_TABLES):
            raise LoadPlanError(
                f"{entry.file.path}: tensor {entry.tensor.name!r} is planned for the "
                "device, but the Engram tables are placed on the host; the model must "
                "declare it in host_resident_weight_patterns"
            )


def _ranks(load_group: LoadGroup) -> Optional[GroupCoordinator]:
    """The ranks that InstantTensor will read with, None for this one alone."""
    if load_group is _DEFAULT_LOAD_GROUP:
        if not torch.distributed.is_initialized():
            return None
        load_group = get_parallel().world_group
    if load_group is None or load_group.world_size == 1:
        return None
    return load_group


def _device() -> torch.device:
    return current_platform.get_device(torch.cuda.current_device())
