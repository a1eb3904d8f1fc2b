"""All layers together: the routes that an engine's load takes, and the whole load."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .broadcast import read_shared
from .faults import reader_faults
from .header import FileHeader
from .plan import LoadPlan, Obstacles, make_plan
from .ranks import Machine, together
from .read import host_tensors, reader_threads
from .ring import plan_within
from .spans import all_read, stream_reader
from .stream import NamedTensors, run_plan


def decide_routes(
    files: Sequence[FileHeader],
    weight_map: Mapping[str, str] | None = None,
    allowed: Machine | None = None,
    *,
    obstacles: Obstacles = lambda files: {},
    reader: str | None = None,
    **choices: Any,
) -> LoadPlan:
    """``make_plan`` within what the machine allows, beside InstantTensor's faults.

    ``obstacles`` are the engine's own; ``reader`` is who reads whole files, None for
    the operator's choice; ``choices`` go to ``make_plan``.
    """
    allowed = allowed or Machine()
    reader = reader or stream_reader()

    def hindrances(files: Sequence[FileHeader]) -> dict[str, str]:
        if reader == "read":
            return all_read(files)
        found = dict(obstacles(files))
        others = [file for file in files if file.path not in found]
        return found | reader_faults(others, old_reader=allowed.old_reader)

    return plan_within(
        allowed.device_budget,
        lambda kept: make_plan(
            files, weight_map=weight_map, kept=kept, obstacles=hindrances, **choices
        ),
    )


def run_load(
    plan: LoadPlan,
    *,
    stream_files: Callable[[list[str]], NamedTensors],
    device: torch.device,
    group: dist.ProcessGroup | None = None,
    device_group: dist.ProcessGroup | None = None,
    copied: Callable[[str], bool] = lambda name: False,
) -> Iterator[tuple[str, torch.Tensor]]:
    """``run_plan`` by positioned reads, with the ranks of ``group``.

    A READ or HOST tensor that fails on one of them raises on all when they have read
    everything. ``device_group`` holds the same ranks for tensors on ``device``: with it
    they read each byte of READ once between them, if there is much. HOST tensors map
    their file, except those whose name is ``copied``.
    """
    threads = reader_threads(plan.node_ranks)
    return run_plan(
        plan,
        stream_files=stream_files,
        device=device,
        read=functools.partial(
            read_shared, device=device, group=device_group, threads=threads
        ),
        host=functools.partial(host_tensors, copied=copied, threads=threads),
        agree=functools.partial(together, group),
    )
