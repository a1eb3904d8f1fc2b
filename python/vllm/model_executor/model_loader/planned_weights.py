# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Weights under load_format instanttensor, each tensor sent where it will live.

InstantTensor reads whole files, all ranks together. A plan made from the headers keeps
that for every file whose tensors all ranks want on the device. Engram tables stay lazy
CPU tensors, what the model does not load is not read, and the rest of such files is
read tensor by tensor.
"""

import dataclasses
import functools
from collections.abc import Callable, Generator, Sequence

import torch

from vllm.distributed.parallel_state import GroupCoordinator, get_world_group
from vllm.distributed.stateless_coordinator import StatelessGroupCoordinator
from vllm.logger import init_logger
from vllm.model_executor.model_loader.ep_weight_filter import should_skip_weight
from vllm.model_executor.model_loader.loadplan import VERSION
from vllm.model_executor.model_loader.loadplan.header import FileHeader, LoadPlanError
from vllm.model_executor.model_loader.loadplan.loading import decide_routes, run_load
from vllm.model_executor.model_loader.loadplan.plan import LoadPlan, Route
from vllm.model_executor.model_loader.loadplan.ranks import Machine, plan_together
from vllm.model_executor.model_loader.loadplan.ring import ring_budget, small_io_depth
from vllm.model_executor.model_loader.loadplan.stream import can_stream, flag, log_plan
from vllm.model_executor.model_loader.weight_utils import _ENGRAM_WEIGHT_RE
from vllm.platforms import current_platform

logger = init_logger(__name__)

NamedTensors = Generator[tuple[str, torch.Tensor], None, None]


def planned_weights_iterator(
    hf_weights_files: list[str],
    use_tqdm_on_load: bool,
    local_expert_ids: set[int] | None = None,
    *,
    load_engram_on_cpu: bool = False,
    hf_folder: str,
    is_unused_weight: Callable[[str], bool] | None,
    stream_weights: Callable[..., NamedTensors],
) -> NamedTensors:
    """Iterate over the weights; whole files go through `stream_weights`."""
    world = _world_group()
    refused = not (can_stream(()) and current_platform.is_cuda())
    if is_disabled() or refused or isinstance(world, StatelessGroupCoordinator):
        yield from stream_weights(
            hf_weights_files,
            use_tqdm_on_load,
            local_expert_ids=local_expert_ids,
            load_engram_on_cpu=load_engram_on_cpu,
        )
        return

    ranks = world if world is not None and world.world_size > 1 else None
    group = None if ranks is None else ranks.cpu_group
    device = torch.device("cuda", current_platform.current_device())

    def machine() -> Machine:
        free_bytes, _ = torch.cuda.mem_get_info(device)
        return Machine(device_budget=ring_budget(free_bytes, {}))

    def decide(
        headers: list[FileHeader], index: dict[str, str] | None, allowed: Machine
    ) -> LoadPlan:
        plan = decide_routes(
            headers,
            index,
            allowed,
            host_resident_weight_patterns=(
                (_ENGRAM_WEIGHT_RE,) if load_engram_on_cpu else ()
            ),
            wanted_weight=(
                None
                if is_unused_weight is None
                else lambda name: not is_unused_weight(name)
            ),
            obstacles=functools.partial(_expert_files, local_expert_ids),
        )
        _check_something_is_wanted(plan)
        return plan

    common_plan = plan_together(
        hf_weights_files, folder=hf_folder, group=group, machine=machine, decide=decide
    )
    plan = _without_remote_experts(common_plan, local_expert_ids)
    log_plan(plan, engine="vLLM", version=VERSION, logger=logger)

    def stream_files(files: list[str]) -> NamedTensors:
        depth = small_io_depth(
            plan.streamed(),
            world_size=1 if ranks is None else ranks.world_size,
            options={},
        )
        return stream_weights(files, use_tqdm_on_load, io_depth=depth)

    # Ranks that keep different experts cannot share what they read.
    alone = ranks is None or local_expert_ids is not None
    yield from run_load(
        plan,
        stream_files=stream_files,
        device=device,
        group=group,
        device_group=None if alone else ranks.device_group,
    )


def is_disabled() -> bool:
    """Whether LOADPLAN_DISABLE gives vLLM its own behaviour back."""
    return flag("LOADPLAN_DISABLE")


def _expert_files(
    local_expert_ids: set[int] | None, files: Sequence[FileHeader]
) -> dict[str, str]:
    """The files that no rank may stream, by path, since others keep other experts."""
    if local_expert_ids is None:
        return {}
    return {
        file.path: "shares its file with weights that some ranks leave out"
        for file in files
        if any(should_skip_weight(tensor.name, set()) for tensor in file.tensors)
    }


def _world_group() -> GroupCoordinator | None:
    try:
        return get_world_group()
    except AssertionError:  # Not initialized, as in unit tests.
        return None


def _check_something_is_wanted(plan: LoadPlan) -> None:
    if not plan.promised:
        raise LoadPlanError(
            f"{plan.entries[0].file.path}: the model wants none of the "
            f"{len(plan.entries)} tensors of this checkpoint, expected some that its "
            "is_unused_checkpoint_weight keeps; does the checkpoint hold the draft?"
        )


def _without_remote_experts(
    plan: LoadPlan, local_expert_ids: set[int] | None
) -> LoadPlan:
    """The part of `plan` that this rank reads; the ranks have agreed on all of it."""
    return dataclasses.replace(
        plan,
        entries=tuple(
            entry._replace(route=Route.SKIP, reason="other ranks' experts")
            if should_skip_weight(entry.tensor.name, local_expert_ids)
            else entry
            for entry in plan.entries
        ),
        promised=frozenset(
            name
            for name in plan.promised
            if not should_skip_weight(name, local_expert_ids)
        ),
    )
