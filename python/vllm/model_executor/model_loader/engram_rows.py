# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Rows of a host-resident Engram table, read straight into the memory that serves."""

from collections.abc import Callable

import torch

from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.model_loader.loadplan.ranks import together


def read_engram_rows(
    target: torch.Tensor, loaded_weight: torch.Tensor, row_start: int
) -> bool:
    """Fill `target` from row `row_start` on; False where only a copy will do."""
    source = getattr(loaded_weight, "row_source", None)
    if source is None or target.device.type != "cpu":
        return False
    if source.dtype == torch.float8_e8m0fnu and target.dtype == torch.uint8:
        # The tables keep the raw bytes of ue8m0 scales.
        target = target.view(source.dtype)
    if target.dtype != source.dtype:
        return False  # A copy converts.
    source.read_rows_into(target.detach(), row_start)
    return True


def load_on_leader(
    group: GroupCoordinator,
    weight_loader: Callable[[torch.Tensor, torch.Tensor], None],
    param: torch.Tensor,
    loaded_weight: torch.Tensor,
) -> None:
    """Let the group's first rank fill shared memory; its failure is every rank's."""

    def load() -> None:
        if group.rank_in_group == 0:
            weight_loader(param, loaded_weight)

    together(group.cpu_group, "the rows of a shared table", load)
