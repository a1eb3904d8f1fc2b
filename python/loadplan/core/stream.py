"""Run a plan: yield every wanted tensor exactly once, where it will live."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator

import torch

from .header import LoadPlanError
from .plan import LoadPlan, Route
from .read import host_tensors, read_tensors

logger = logging.getLogger(__name__)

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def run_plan(
    plan: LoadPlan,
    *,
    stream_files: Callable[[list[str]], NamedTensors],
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` for every wanted tensor of ``plan``.

    Args:
        plan: The routes.
        stream_files: The engine's InstantTensor iterator over whole files, called once
            and only if there is something to stream.
        device: Where READ tensors go.

    Raises:
        LoadPlanError: a tensor arrived twice, or not at all.
    """
    missing = set(plan.promised)
    try:
        for name, tensor in _routes(plan, stream_files=stream_files, device=device):
            if name not in missing:
                raise LoadPlanError(
                    f"tensor {name!r} arrived "
                    + ("twice" if name in plan.promised else "and is in no header")
                    + "; report this with the checkpoint's index"
                )
            missing.remove(name)
            yield name, tensor
    except GeneratorExit:
        if missing:
            logger.warning(
                "The load was stopped after %d of %d tensors.",
                len(plan.promised) - len(missing),
                len(plan.promised),
            )
        raise
    if missing:
        raise LoadPlanError(
            f"{len(missing)} tensor(s) never arrived: {sorted(missing)[:10]}; "
            "report this with the checkpoint's index"
        )


def _routes(
    plan: LoadPlan,
    *,
    stream_files: Callable[[list[str]], NamedTensors],
    device: torch.device,
) -> Iterator[tuple[str, torch.Tensor]]:
    files = plan.stream_files
    if files:
        opened = set(files)
        dropped = {
            entry.tensor.name
            for entry in plan.of(Route.SKIP)
            if entry.file.path in opened
        }
        for name, tensor in stream_files(files):
            if name not in dropped:
                yield name, tensor
    yield from read_tensors(plan.of(Route.READ), device)
    # Last, so that two streams of requests never compete for the disk.
    yield from host_tensors(plan.of(Route.HOST))
