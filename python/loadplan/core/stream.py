"""Run a plan: yield every wanted tensor exactly once, where it will live."""

from __future__ import annotations

import functools
import importlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open

from .header import LoadPlanError
from .plan import LoadPlan, PlannedTensor, Route

logger = logging.getLogger(__name__)

NamedTensors = Iterable[tuple[str, torch.Tensor]]

_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")


def flag(name: str) -> bool:
    """An environment variable that says yes or no.

    Raises:
        LoadPlanError: it says neither.
    """
    value = os.environ.get(name, "")
    if value.lower() not in _YES + _NO:
        raise LoadPlanError(
            f"{name} is {value!r}, expected one of {_YES} or of {_NO} (not at all)"
        )
    return value.lower() in _YES


def can_stream(files: Iterable[str]) -> bool:
    """Whether InstantTensor is here and takes files of these names."""
    if not all(file.endswith(".safetensors") for file in files):
        return False
    try:
        importlib.import_module("instanttensor")
    except ImportError:
        return False
    return True


def run_plan(
    plan: LoadPlan,
    *,
    stream_files: Callable[[list[str]], NamedTensors],
    device: torch.device,
    read: Callable[[list[PlannedTensor]], NamedTensors] | None = None,
    host: Callable[[list[PlannedTensor]], NamedTensors] | None = None,
    agree: Callable[[str, Callable[[], None]], Any] = lambda step, work: work(),
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``(name, tensor)`` for every wanted tensor of ``plan``.

    ``stream_files`` is the engine's InstantTensor iterator over whole files, called
    once and only with files. ``read`` yields READ tensors on ``device`` and ``host``
    HOST tensors on the CPU, both by default through official safetensors' lazy ones.
    ``agree`` takes a step's name and its work, by default of this rank alone; what
    ``read`` or ``host`` raised is raised there.

    Raises:
        LoadPlanError: a tensor arrived twice or not at all.
    """
    read = read or functools.partial(lazy_tensors, device=device)
    host = host or lazy_tensors
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
            # HOST is last, so that two streams of requests never compete for the disk.
            for reader, route in ((read, Route.READ), (host, Route.HOST)):
                for name, tensor in reader(plan.of(route)):
                    arrived(name)
                    yield name, tensor
        except Exception as error:
            failure = error
        agree("the end of the load", finish)
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
    files = plan.streamed()
    if not files:
        return
    # InstantTensor opens them itself.
    for file in files:
        file.check_unchanged(os.stat(file.path))
    opened = set(plan.stream_files)
    dropped = {
        entry.tensor.name for entry in plan.of(Route.SKIP) if entry.file.path in opened
    }
    for name, tensor in stream_files(plan.stream_files):
        if name not in dropped:
            yield name, tensor


def lazy_tensors(
    entries: Iterable[PlannedTensor], device: torch.device | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor as official safetensors maps it, or a copy on ``device``."""
    path = opened = None
    for entry in entries:
        if path != entry.file.path:
            path = entry.file.path
            entry.file.check_unchanged(os.stat(path))
            opened = safe_open(path, framework="pt", device="cpu")
        tensor = opened.get_tensor(entry.tensor.name)
        yield (
            entry.tensor.name,
            tensor if device is None else put_on_device(tensor, device),
        )


def put_on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a host tensor: all that a plan by itself puts on the device."""
    return tensor.to(device, copy=True)


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
