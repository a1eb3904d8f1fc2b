"""What a patched engine's log says of a plan, in the same words in every engine."""

from __future__ import annotations

import logging

import torch.distributed as dist

from .plan import LoadPlan, Route


def log_plan(
    plan: LoadPlan, *, engine: str, version: str, logger: logging.Logger
) -> None:
    """Log on the first rank what is streamed, and what is not and why."""
    if dist.is_initialized() and dist.get_rank() != 0:
        return
    stream = plan.totals()[Route.STREAM]
    logger.info(
        "This %s is patched by loadplan %s (LOADPLAN_DISABLE=1 turns it off): "
        "InstantTensor streams %d files, %d tensors, %.2f GiB.",
        engine,
        version,
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
