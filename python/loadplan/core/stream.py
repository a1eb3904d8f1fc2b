"""Run a plan: yield every wanted tensor exactly once, where it will live."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist

from .broadcast import fill_together
from .header import LoadPlanError
from .plan import LoadPlan, Route
from .ranks import together
from .read import host_tensors
from .spans import fill_spans, read_tensors

logger = logging.getLogger(__name__)

# Less than this is read by every rank alone: it costs no more than the exchange.
_LEAST_SHARED_BYTES = 512 << 20

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def run_plan(
    plan: LoadPlan,
    *,
    stream_files: Callable[[list[str]], NamedTensors],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    device_group: dist.ProcessGroup | None = None,
    copied: Callable[[str], bool] = lambda name: False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` for every wanted tensor of ``plan``.

    ``stream_files`` is the engine's InstantTensor iterator over whole files, called
    once and only with files; READ tensors go to ``device``. HOST tensors map their
    file, except those whose name is ``copied``: they are read into anonymous memory. A
    READ or HOST tensor that fails on a rank of ``group`` raises on all of them when
    they have read everything. ``device_group`` holds the same ranks for tensors on
    ``device``: with it they read each byte of READ once between them, if there is much.

    Raises:
        LoadPlanError: a tensor arrived twice or not at all, or another rank failed.
    """
    missing = set(plan.promised)

    def arrived(name: str) -> None:
        if name not in missing:
            raise LoadPlanError(
                f"tensor {name!r} arrived "
                + ("twice" if name in plan.promised else "and is in no header")
                + "; report this with the checkpoint's index"
            )
        missing.remove(name)

    def finish() -> None:
        if failure is not None:
            raise failure
        if missing:
            raise LoadPlanError(
                f"{len(missing)} tensor(s) never arrived: {sorted(missing)[:10]}; "
                "report this with the checkpoint's index"
            )

    failure = None
    try:
        # What fails here is raised at once: the other ranks may be in a collective read
        # and would not hear of it.
        for name, tensor in _streamed(plan, stream_files):
            arrived(name)
            yield name, tensor
        try:
            for name, tensor in _read(plan, device, device_group, copied):
                arrived(name)
                yield name, tensor
        except Exception as error:
            failure = error
        together(group, "the end of the load", finish)
    except GeneratorExit:
        if missing:
            logger.warning(
                "The load was stopped after %d of %d tensors.",
                len(plan.promised) - len(missing),
                len(plan.promised),
            )
        raise


def _streamed(
    plan: LoadPlan, stream_files: Callable[[list[str]], NamedTensors]
) -> Iterator[tuple[str, torch.Tensor]]:
    files = plan.stream_files
    if not files:
        return
    opened = set(files)
    dropped = {
        entry.tensor.name for entry in plan.of(Route.SKIP) if entry.file.path in opened
    }
    for name, tensor in stream_files(files):
        if name not in dropped:
            yield name, tensor


def _read(
    plan: LoadPlan,
    device: torch.device,
    group: dist.ProcessGroup | None,
    copied: Callable[[str], bool],
) -> Iterator[tuple[str, torch.Tensor]]:
    fill, entries = fill_spans, plan.of(Route.READ)
    if (
        group is not None
        and dist.get_world_size(group) > 1
        and plan.totals()[Route.READ].nbytes >= _LEAST_SHARED_BYTES
    ):
        fill = functools.partial(fill_together, group=group)
        # Each rank may have been given the files in an order of its own.
        entries.sort(key=lambda entry: entry.file.path)
    yield from read_tensors(entries, device, fill)
    # Last, so that two streams of requests never compete for the disk.
    yield from host_tensors(plan.of(Route.HOST), copied)
