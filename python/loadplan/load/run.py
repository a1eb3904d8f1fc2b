"""Load a checkpoint through a patched engine's own loader and prove what arrived.

The engine's ``DefaultModelLoader`` yields the tensors; Engram tables go through the
engine's ``EngramEmbedding`` into the memory that would serve them. Every tensor's bytes
are hashed and compared with the seed of a synthetic checkpoint, or with official
safetensors for any other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch

from loadplan.core.plan import LoadPlan
from loadplan.load.digests import Digests
from loadplan.load.engine import Engine
from loadplan.load.expected import expected_digests, wanted_entries
from loadplan.load.peaks import Peaks, Watch
from loadplan.load.report import DefaultReport, LoadReport, RouteReport
from loadplan.synth.options import read_options
from loadplan.synth.writer import damaged_files


class Steps(Protocol):
    """Told how far a load is."""

    def begin(self, phase: str, nbytes: int) -> None:
        """A phase begins, or goes on, that moves ``nbytes`` in all."""

    def done(self, nbytes: int) -> None:
        """So much of the phase is done."""


class _NoSteps:
    def begin(self, phase: str, nbytes: int) -> None:
        pass

    def done(self, nbytes: int) -> None:
        pass


def run_load(
    engine: Engine,
    plan: LoadPlan,
    checkpoint: Path,
    *,
    reader: str,
    compare: bool = False,
    steps: Steps | None = None,
) -> LoadReport:
    """Load ``checkpoint`` through ``engine`` and compare every byte.

    Nothing goes on when it ends, however it ends.

    Args:
        engine: An open engine.
        plan: Its plan for the checkpoint.
        checkpoint: The folder.
        reader: What stands behind InstantTensor, for the report.
        compare: Load with the default loader too; each load then begins without the
            checkpoint in the page cache.
        steps: Is told how far it is.
    """
    steps = steps or _NoSteps()
    wanted = {entry.tensor.name: entry for entry in wanted_entries(plan)}
    totals = {route.value: total for route, total in plan.totals().items()}
    nbytes = sum(entry.tensor.nbytes for entry in wanted.values())

    def route_of(name: str) -> str:
        return wanted[name].route.value

    def phase_of(name: str) -> tuple[str, int]:
        return route_of(name).upper(), totals[route_of(name)].nbytes

    if compare:
        _drop_cached(plan)
    started = time.perf_counter()
    arrival = _take_all(engine, engine.weights(), steps=steps, phase_of=phase_of)
    seconds = time.perf_counter() - started
    digests = arrival.digests
    steps.begin("checking", nbytes)
    expected, reference = expected_digests(checkpoint, plan, steps.done)
    wrong = sorted(
        name
        for name in digests.keys() | expected.keys()
        if digests.get(name) != expected.get(name)
    )
    options = read_options(checkpoint)
    if options is not None:
        wrong += damaged_files(checkpoint, options)
    default = None
    if compare:
        _drop_cached(plan)
        phase = ("default loader", nbytes)
        other = _take_all(
            engine, engine.default_weights(), steps=steps, phase_of=lambda name: phase
        )
        # Checking costs the faster loader more; what is compared checks nothing.
        steps.begin("timing", 2 * nbytes)
        _drop_cached(plan)
        loadplan_seconds, _ = _time_load(engine, engine.weights(), steps)
        _drop_cached(plan)
        seconds_of_default, peaks = _time_load(engine, engine.default_weights(), steps)
        default = DefaultReport(
            seconds=seconds_of_default,
            peaks=peaks,
            same=other.digests == digests,
            loadplan_seconds=loadplan_seconds,
        )
    whole = hashlib.sha256()
    for name in sorted(digests):
        whole.update(f"{name}\0{digests[name]}\n".encode())
    route_seconds = dict.fromkeys(totals, 0.0)
    for name, taken in arrival.seconds.items():
        route_seconds[route_of(name)] += taken
    return LoadReport(
        engine=engine.name,
        reader=reader,
        routes={
            route: RouteReport(
                files=total.files,
                tensors=total.tensors,
                nbytes=total.nbytes,
                seconds=route_seconds[route],
            )
            for route, total in totals.items()
        },
        stock_device_bytes=sum(entry.tensor.nbytes for entry in plan.entries),
        table_bytes=arrival.table_bytes,
        loading_seconds=sum(arrival.seconds.values()),
        seconds=seconds,
        peaks=arrival.peaks,
        default=default,
        digest=whole.hexdigest(),
        reference=reference,
        wrong=tuple(wrong),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Arrival:
    """What one pass over the weights brought: digests and seconds by name."""

    digests: dict[str, str]
    seconds: dict[str, float]
    peaks: Peaks
    table_bytes: int


def _take_all(
    engine: Engine,
    weights: Iterator[tuple[str, torch.Tensor]],
    *,
    steps: Steps,
    phase_of: Callable[[str], tuple[str, int]],
) -> _Arrival:
    """Take every weight to where it lives, and hash it there."""
    seconds: dict[str, float] = {}
    phase = None
    with Digests() as digests, contextlib.closing(_each(weights)) as weights:
        with Watch(besides=lambda: digests.pending) as watch:
            while True:
                before = time.perf_counter()
                name, tensor = next(weights, (None, None))
                if name is None:
                    break
                is_table = engine.take(name, tensor)
                if not is_table and torch.cuda.is_available():
                    tensor = tensor.cuda()
                    torch.cuda.synchronize()
                seconds[name] = time.perf_counter() - before
                if phase != phase_of(name):
                    phase = phase_of(name)
                    steps.begin(*phase)
                steps.done(tensor.nbytes)
                if not is_table:
                    digests.add(name, tensor.cpu())
        tables = engine.finish()
        for name, table in tables.items():
            digests.add(name, table.cpu())
        return _Arrival(
            digests=digests.result(),
            seconds=seconds,
            peaks=watch.peaks(),
            table_bytes=sum(table.nbytes for table in tables.values()),
        )


def _time_load(
    engine: Engine, weights: Iterator[tuple[str, torch.Tensor]], steps: Steps
) -> tuple[float, Peaks]:
    """Seconds and peak memory until every weight is where it lives."""
    on_gpu = torch.cuda.is_available()
    with Watch() as watch, contextlib.closing(_each(weights)) as weights:
        started = time.perf_counter()
        for name, tensor in weights:
            if not engine.take(name, tensor) and on_gpu:
                tensor = tensor.cuda()
            steps.done(tensor.nbytes)
        if on_gpu:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - started
    engine.finish()
    return seconds, watch.peaks()


def _each(weights: Iterator[Any]) -> Iterator[Any]:
    """Closing this closes ``weights`` too, where they can be closed."""
    yield from weights


def _drop_cached(plan: LoadPlan) -> None:
    """Let the files go from the page cache, as far as nothing maps them."""
    for path in {entry.file.path for entry in plan.entries}:
        with open(path, "rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
