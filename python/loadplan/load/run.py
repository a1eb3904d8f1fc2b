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
import importlib
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from loadplan.core.header import LoadPlanError, TensorHeader
from loadplan.core.plan import LoadPlan, PlannedTensor, Route
from loadplan.load.digests import PIECE, Digests
from loadplan.load.peaks import Peaks, Watch
from loadplan.synth import recipes


@dataclasses.dataclass(frozen=True, slots=True)
class RouteReport:
    """What one route moved; ``seconds`` is the time its tensors took to arrive."""

    files: int
    tensors: int
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class DefaultReport:
    """The same load through the engine's default loader, tensors to the GPU included.

    ``seconds`` and ``peaks`` are of a load that checks nothing, ``loadplan_seconds`` of
    one like it through loadplan. ``same`` tells whether every byte is the same.
    """

    seconds: float
    peaks: Peaks
    same: bool
    loadplan_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load. ``stock_device_bytes`` is what whole files would put there.

    ``loading_seconds`` is the time until the last tensor had arrived, without checking;
    ``seconds`` is with it. ``table_bytes`` were in host memory before. ``digest`` is
    over every tensor that arrived, ``wrong`` names those whose bytes differ from
    ``reference``, those missing, those that nobody expected, and files of a synthetic
    checkpoint whose header or text is not what was written.
    """

    engine: str
    reader: str
    routes: dict[str, RouteReport]
    stock_device_bytes: int
    table_bytes: int
    loading_seconds: float
    seconds: float
    peaks: Peaks
    default: DefaultReport | None
    digest: str
    reference: str
    wrong: tuple[str, ...]


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


class Host(Protocol):
    """A patched engine, open for one load on a single rank."""

    name: str

    def tables(self) -> str:
        """Where the Engram tables live, as the server logs it."""

    def plan(self) -> LoadPlan:
        """The plan that the engine's glue makes, without running it."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The engine's own iterator over the checkpoint."""

    def default_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same of its default load format."""

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Load ``tensor`` into a table, if it is one; the engine's loader does it."""

    def finish(self) -> dict[str, torch.Tensor]:
        """End the load as the engine does; the tables by checkpoint name."""


# Each has a function open_host, a context that yields a Host.
HOSTS = {"sglang": "sglang", "tokenspeed": "tokenspeed"}


@contextlib.contextmanager
def open_engine(
    name: str, checkpoint: Path, *, engram_config: str | None
) -> Iterator[Host]:
    """The patched engine called ``name`` from ``sys.path``.

    Raises:
        LoadPlanError: its loader cannot be run here.
    """
    if name not in HOSTS:
        raise LoadPlanError(
            f"'loadplan load' cannot run {name!r}, expected one of {sorted(HOSTS)}"
        )
    with warnings.catch_warnings():
        # Modules that are imported along the way tell what they miss for serving.
        warnings.simplefilter("ignore", UserWarning)
        module = importlib.import_module(f".{HOSTS[name]}", __package__)
        with module.open_host(checkpoint, engram_config=engram_config) as host:
            yield host


def wanted_entries(plan: LoadPlan) -> list[PlannedTensor]:
    """What the model gets. The plan's routes are the engine's copy of ours."""
    return [entry for entry in plan.entries if entry.route.value != Route.SKIP.value]


def run_load(
    engine: Host,
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
    expected, reference = _expected_digests(checkpoint, plan, steps)
    wrong = sorted(
        name
        for name in digests.keys() | expected.keys()
        if digests.get(name) != expected.get(name)
    )
    options = recipes.read_options(checkpoint)
    if options is not None:
        wrong += recipes.damaged_files(checkpoint, options)
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
    engine: Host,
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
    engine: Host, weights: Iterator[tuple[str, torch.Tensor]], steps: Steps
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


def _expected_digests(
    checkpoint: Path, plan: LoadPlan, steps: Steps
) -> tuple[dict[str, str], str]:
    """What each tensor's digest must be, and where that knowledge comes from."""
    sizes = {entry.tensor.name: entry.tensor.nbytes for entry in plan.entries}
    options = recipes.read_options(checkpoint)
    reference = "official safetensors"
    with Digests() as digests:
        if options is None:
            _add_official(digests, plan)
        else:
            reference = f"the seed {options.seed} of the synthetic checkpoint"
            for shard in recipes.layout(options):
                for spec in shard.tensors:
                    dtype = str(recipes.torch_dtype(spec.dtype))
                    pieces = _synth_pieces(options.seed, spec)
                    digests.add_pieces(spec.name, dtype, spec.shape, pieces)
        return digests.result(lambda name: steps.done(sizes.get(name, 0))), reference


def _synth_pieces(seed: int, spec: TensorHeader) -> Iterator[Any]:
    for begin in range(0, spec.nbytes, PIECE):
        stop = min(begin + PIECE, spec.nbytes)
        yield recipes.content(seed, spec.name, begin, stop)


def _add_official(digests: Digests, plan: LoadPlan) -> None:
    paths: dict[str, list[str]] = {}
    for entry in wanted_entries(plan):
        paths.setdefault(entry.file.path, []).append(entry.tensor.name)
    for path, names in paths.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                digests.add(name, file.get_tensor(name))


def check_checkpoint(checkpoint: Path) -> None:
    """Refuse early what no loader can open.

    Raises:
        LoadPlanError: not a folder, or no config.json in it that can be read.
    """
    config = checkpoint / "config.json"
    if not config.is_file():
        raise LoadPlanError(
            f"{checkpoint}: no config.json, expected a folder with a checkpoint; "
            "'loadplan synth DIR' makes one"
        )
    try:
        json.loads(config.read_bytes())
    except ValueError as error:
        raise LoadPlanError(
            f"{config}: not JSON ({error}), expected a model's configuration; "
            "download the file again"
        ) from error
