# Copyright (c) 2026 LightSeek Foundation
#
# Permission is hereby granted, free of charge, to any person obtaining a copy
# of this software and associated documentation files (the "Software"), to deal
# in the Software without restriction, including without limitation the rights
# to use, copy, modify, merge, publish, distribute, sublicense, and/or sell
# copies of the Software, and to permit persons to whom the Software is
# furnished to do so, subject to the following conditions:
#
# The above copyright notice and this permission notice shall be included in
# all copies or substantial portions of the Software.
#
# THE SOFTWARE IS PROVIDED "AS IS", WITHOUT WARRANTY OF ANY KIND, EXPRESS OR
# IMPLIED, INCLUDING BUT NOT LIMITED TO THE WARRANTIES OF MERCHANTABILITY,
# FITNESS FOR A PARTICULAR PURPOSE AND NONINFRINGEMENT. IN NO EVENT SHALL THE
# AUTHORS OR COPYRIGHT HOLDERS BE LIABLE FOR ANY CLAIM, DAMAGES OR OTHER
# LIABILITY, WHETHER IN AN ACTION OF CONTRACT, TORT OR OTHERWISE, ARISING FROM,
# OUT OF OR IN CONNECTION WITH THE SOFTWARE OR THE USE OR OTHER DEALINGS IN THE
# SOFTWARE.


"""Weights under --load-format instanttensor, each tensor sent where it will live.

InstantTensor streams whole files to the device. A plan made from the headers keeps it
for the files that go there whole; what a model rejects is not read, host-resident
weights stay lazy CPU tensors, and the rest of their files is read tensor by tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import torch
from tokenspeed_kernel.platform import current_platform

from tokenspeed.runtime.distributed.process_group_manager import (
    process_group_manager as pg_manager,
)
from tokenspeed.runtime.model_loader.loadplan import VERSION
from tokenspeed.runtime.model_loader.loadplan.faults import is_old_reader
from tokenspeed.runtime.model_loader.loadplan.header import (
    FileHeader,
    LoadPlanError,
    read_index,
)
from tokenspeed.runtime.model_loader.loadplan.loading import decide_routes, run_load
from tokenspeed.runtime.model_loader.loadplan.plan import (
    LoadPlan,
    UnloadableTensorError,
)
from tokenspeed.runtime.model_loader.loadplan.ranks import Machine, plan_together
from tokenspeed.runtime.model_loader.loadplan.ring import ring_budget, small_io_depth
from tokenspeed.runtime.model_loader.loadplan.stream import can_stream, flag, log_plan
from tokenspeed.runtime.utils import get_colorful_logger

if TYPE_CHECKING:
    from tokenspeed.runtime.model_loader.loader import DefaultModelLoader

logger = get_colorful_logger(__name__)

NamedTensors = Iterator[tuple[str, torch.Tensor]]


def planned_weights_iterator(
    hf_weights_files: list[str],
    *,
    hf_folder: str,
    source: DefaultModelLoader.Source,
    weight_name_filter: Callable[[str], bool] | None,
    stream_weights: Callable[..., NamedTensors],
    process_group: torch.distributed.ProcessGroup | None,
) -> NamedTensors:
    """Iterate over the weights of ``source`` that the model accepts.

    The plan is made at once, so that what it refuses raises here and not at the first
    tensor. All ranks of ``process_group`` call this together.

    Args:
        hf_weights_files: Local paths to the ``*.safetensors`` shards.
        hf_folder: Checkpoint directory, with the index if there is one.
        source: What is loaded; its patterns name the host-resident weights.
        weight_name_filter: Predicate on names with ``source.prefix`` applied, None
            accepts all.
        stream_weights: The InstantTensor iterator over whole files.
        process_group: Ranks consuming the same weights, or None.

    Returns:
        An iterator over ``(name, tensor)``, tensors on the current CUDA device; those
        of host-resident weights are CPU tensors and come last.
    """
    disabled = is_disabled()
    if disabled:
        logger.info(f"loadplan {VERSION} is turned off by LOADPLAN_DISABLE.")
    # What the format's own iterator refuses, it refuses before it opens a file.
    on_cuda = current_platform().is_nvidia
    if disabled or not on_cuda or not can_stream(hf_weights_files):
        return stream_weights(hf_weights_files, process_group=process_group)

    wanted_weight = None
    if weight_name_filter is not None:

        def wanted_weight(name: str) -> bool:
            return weight_name_filter(source.prefix + name)

    group = host_group(process_group)
    try:
        plan = plan_weights(
            hf_weights_files,
            hf_folder=hf_folder,
            source=source,
            wanted_weight=wanted_weight,
            group=group,
        )
    except UnloadableTensorError as error:
        # The format's own iterator knows what to tell about a sub-byte dtype.
        stream_weights([error.path], process_group=process_group)
        raise
    log_plan(plan, engine="TokenSpeed", version=VERSION, logger=logger)

    def stream_files(files: list[str]) -> NamedTensors:
        depth = small_io_depth(
            plan.streamed(),
            world_size=1 if group is None else torch.distributed.get_world_size(group),
            options={},
        )
        return stream_weights(files, process_group=process_group, io_depth=depth)

    return run_load(
        plan,
        stream_files=stream_files,
        device=_device(),
        group=group,
        device_group=process_group,
    )


def plan_weights(
    hf_weights_files: list[str],
    *,
    hf_folder: str,
    source: DefaultModelLoader.Source,
    wanted_weight: Callable[[str], bool] | None,
    group: torch.distributed.ProcessGroup | None,
) -> LoadPlan:
    """Decide from the headers where each tensor goes, on all ranks alike."""

    def machine() -> Machine:
        free_bytes, _ = torch.cuda.mem_get_info(_device())
        return Machine(
            device_budget=ring_budget(free_bytes, {}), old_reader=is_old_reader()
        )

    def decide(
        headers: list[FileHeader], index: dict[str, str] | None, allowed: Machine
    ) -> LoadPlan:
        plan = decide_routes(
            headers,
            index,
            allowed,
            host_resident_weight_patterns=source.host_resident_weight_patterns,
            wanted_weight=wanted_weight,
        )
        check(plan)
        return plan

    def check(plan: LoadPlan) -> None:
        if not plan.promised:
            raise LoadPlanError(
                f"{hf_folder}: the model accepts none of {len(plan.entries)} tensors, "
                "expected some; is this the model's checkpoint?"
            )
        present = set(hf_weights_files)
        for name, path in (read_index(hf_folder) or {}).items():
            if path in present or not (wanted_weight is None or wanted_weight(name)):
                continue
            raise LoadPlanError(
                f"{path}: no such file, but the index promises tensor {name!r} there; "
                "download it, or remove its tensors from the index"
            )

    return plan_together(
        hf_weights_files,
        folder=hf_folder,
        group=group,
        machine=machine,
        decide=decide,
    )


def host_group(
    process_group: torch.distributed.ProcessGroup | None,
) -> torch.distributed.ProcessGroup | None:
    """The ranks of ``process_group`` as a group for host objects, None if alone."""
    if process_group is None or process_group.size() == 1:
        return None
    ranks = tuple(torch.distributed.get_process_group_ranks(process_group))
    if pg_manager.has_process_group("gloo", ranks):
        return pg_manager.get_process_group("gloo", ranks)
    return process_group


def is_disabled() -> bool:
    """Whether the operator wants the engine as it is without loadplan."""
    return flag("LOADPLAN_DISABLE")


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())
