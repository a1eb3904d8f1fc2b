"""What a load will do, from the headers alone: no payload, no engine, no GPU.

The routes are those of the same plan that a patched engine makes. Memory is an
estimate, see ``estimates``; stock is the unpatched engine, which streams whole files.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable, Sequence
from pathlib import Path

from loadplan.checkpoint import estimates, oddities
from loadplan.checkpoint.estimates import Memory
from loadplan.checkpoint.files import Checkpoint, read_checkpoint
from loadplan.checkpoint.oddities import Oddity
from loadplan.checkpoint.placement import Placement, parse_placement
from loadplan.core import ranks
from loadplan.core.header import FileHeader, LoadPlanError
from loadplan.core.loading import decide_routes
from loadplan.core.plan import LoadPlan, PlannedTensor, RouteTotal

_LARGEST = 5

DRAFTS = {
    "dspark": "names that begin with 'mtp.'",
    "mtp": "names below 'mtp.' and layers past num_hidden_layers",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """What a checkpoint will be loaded on: GPUs in one group, memory in bytes of each.

    None for a memory means that nobody said.
    """

    tp: int = 1
    nodes: int = 1
    gpu_memory: int | None = None
    host_memory: int | None = None

    def __post_init__(self) -> None:
        if self.tp % self.nodes:
            raise LoadPlanError(
                f"--nodes: {self.nodes} for --tp {self.tp}, expected a number that "
                "divides it; every node has as many GPUs"
            )


@dataclasses.dataclass(frozen=True, slots=True)
class Large:
    """A large tensor: its header's shape and dtype, the file relative to the folder."""

    name: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    file: str
    route: str


@dataclasses.dataclass(frozen=True, slots=True)
class Load:
    """One pass over the checkpoint: the model's, or the draft's after it.

    ``routes`` maps a route's value to what it carries; ``stock_bytes`` pass through
    every GPU without the plan.
    """

    what: str
    routes: dict[str, RouteTotal]
    stock_bytes: int
    stock_gpu: Memory
    plan_gpu: Memory
    stock_host: Memory
    plan_host: Memory

    @property
    def device_bytes(self) -> int:
        """What passes through every GPU with the plan."""
        return self.routes["read"].nbytes + self.routes["stream"].nbytes


@dataclasses.dataclass(frozen=True, slots=True)
class Inspection:
    """The whole answer; sizes in bytes."""

    checkpoint: str
    files: int
    tensors: int
    nbytes: int
    indexed: bool
    machine: Hardware
    placement: Placement
    draft: str | None
    loads: tuple[Load, ...]
    largest: tuple[Large, ...]
    oddities: tuple[Oddity, ...]

    def verdict(self, side: str) -> bool | None:
        """Whether ``stock`` or ``plan`` fits, None if nobody said into what."""
        answers = [
            getattr(load, f"{side}_{place}").fits
            for load in self.loads
            for place in ("gpu", "host")
        ]
        if False in answers:
            return False
        return True if True in answers else None


def inspect(
    paths: Sequence[Path],
    *,
    machine: Hardware,
    engram_config: str,
    draft: str | None = None,
) -> Inspection:
    """Read the headers of a folder, or of files of one, and tell what a load will do.

    ``draft`` is a key of ``DRAFTS`` or None. Its weights are told from the others by
    the checkpoint's naming; the engine's own filter decides when it loads.

    Raises:
        LoadPlanError: what no load could do either.
    """
    placement = parse_placement(engram_config, nodes=machine.nodes)
    checkpoint = read_checkpoint(paths)
    maker = _Loads(checkpoint, machine=machine, placement=placement)
    plan, load = maker.model()
    plans, loads = [plan], [load]
    if draft is not None:
        plan, load = maker.draft(draft, model=load)
        plans.append(plan)
        loads.append(load)
    entries = plans[0].entries
    return Inspection(
        checkpoint=str(paths[0] if len(paths) == 1 else checkpoint.folder),
        files=len(checkpoint.headers),
        tensors=len(entries),
        nbytes=sum(file.payload_bytes for file in checkpoint.headers),
        indexed=checkpoint.weight_map is not None,
        machine=machine,
        placement=placement,
        draft=draft,
        loads=tuple(loads),
        largest=_largest(checkpoint, entries),
        oddities=oddities.find(checkpoint, plans),
    )


class _Loads:
    """Makes the plans of one checkpoint on one machine, and what they take."""

    def __init__(
        self, checkpoint: Checkpoint, *, machine: Hardware, placement: Placement
    ) -> None:
        self._checkpoint = checkpoint
        self._machine = machine
        self._placement = placement

    def model(self) -> tuple[LoadPlan, Load]:
        # A draft's weights pass by and are dropped.
        return self._load(
            "model",
            self._checkpoint.headers,
            lives=lambda name: not self._checkpoint.is_draft_name(name),
        )

    def draft(self, kind: str, *, model: Load) -> tuple[LoadPlan, Load]:
        """The pass after the model's, whose weights and tables are there already."""

        def wanted(name: str) -> bool:
            return self._checkpoint.is_draft_name(name, kind)

        headers = self._checkpoint.draft_headers
        if not any(wanted(tensor.name) for file in headers for tensor in file.tensors):
            raise LoadPlanError(
                f"{self._checkpoint.folder}: no tensor of a {kind} draft, expected "
                f"{DRAFTS[kind]}; leave --draft out"
            )
        return self._load(
            "draft",
            headers,
            lives=wanted,
            wanted_weight=wanted,
            resident=model.plan_gpu.parts[estimates.WEIGHTS],
        )

    def _load(
        self,
        what: str,
        headers: list[FileHeader],
        *,
        lives: Callable[[str], bool],
        wanted_weight: Callable[[str], bool] | None = None,
        resident: int = 0,
    ) -> tuple[LoadPlan, Load]:
        machine, placement = self._machine, self._placement
        owner = self._checkpoint.weight_map or {}
        weights, tables = resident, []
        for file in headers:
            for tensor in file.tensors:
                if owner.get(tensor.name, file.path) != file.path:
                    continue
                if placement.is_on_host(tensor.name):
                    tables.append(tensor)
                elif lives(tensor.name):
                    weights += estimates.share(tensor, machine.tp)
        budget = estimates.budget(machine.gpu_memory, weights)
        plan = decide_routes(
            headers,
            self._checkpoint.weight_map,
            ranks.Machine(device_budget=budget),
            host_resident_weight_patterns=placement.host_resident_weight_patterns,
            wanted_weight=wanted_weight,
        )
        gpu = {"weights": weights, "limit": machine.gpu_memory}
        buffers = machine.tp // machine.nodes * estimates.read_buffers(plan)
        host_ranks = machine.tp // machine.nodes
        host = {"tp": machine.tp, "ranks": host_ranks, "limit": machine.host_memory}
        return plan, Load(
            what=what,
            routes={route.value: total for route, total in plan.totals().items()},
            stock_bytes=sum(file.payload_bytes for file in headers),
            stock_gpu=estimates.stock_gpu(headers, **gpu),
            plan_gpu=estimates.plan_gpu(plan, tp=machine.tp, **gpu),
            stock_host=estimates.host(tables, buffers=0, **host),
            plan_host=estimates.host(tables, buffers=buffers, **host),
        )


def _largest(
    checkpoint: Checkpoint, entries: Sequence[PlannedTensor]
) -> tuple[Large, ...]:
    largest = heapq.nlargest(_LARGEST, entries, key=lambda e: e.tensor.nbytes)
    return tuple(
        Large(
            name=entry.tensor.name,
            nbytes=entry.tensor.nbytes,
            dtype=entry.tensor.dtype,
            shape=entry.tensor.shape,
            file=checkpoint.relative(entry.file.path),
            route=entry.route.value,
        )
        for entry in largest
    )
