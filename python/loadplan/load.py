"""Load a checkpoint through a patched engine's own loader and prove what arrived.

The engine's ``DefaultModelLoader`` yields the tensors; Engram tables go through the
engine's ``EngramEmbedding`` into the memory that would serve them. Every tensor's bytes
are hashed and compared with the seed of a synthetic checkpoint, or with official
safetensors for any other.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import hashlib
import importlib
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open

from . import synth
from .core import LoadPlan, LoadPlanError, PlannedTensor, Route, TensorHeader

# Bytes that wait for their digest at most: they are host memory.
_PENDING_BYTES = 1 << 30

# Every digest is over pieces of this size, so that a table is never held twice.
_PIECE = 16 << 20


@dataclasses.dataclass(frozen=True, slots=True)
class RouteReport:
    """What one route moved; ``seconds`` is the time its tensors took to arrive."""

    files: int
    tensors: int
    nbytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class LoadReport:
    """The result of a load. ``stock_device_bytes`` is what whole files would put there.

    ``digest`` is over every tensor that arrived, ``wrong`` names those whose bytes
    differ from ``reference``, those missing, those that nobody expected, and files of a
    synthetic checkpoint whose header or text is not what was written.
    """

    engine: str
    reader: str
    routes: dict[str, RouteReport]
    stock_device_bytes: int
    seconds: float
    digest: str
    reference: str
    wrong: tuple[str, ...]


class Digests:
    """SHA-256 of tensors by name, computed in the background with bounded memory."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        self._room = threading.Condition()
        self._pending = 0
        self._futures: dict[str, concurrent.futures.Future[str]] = {}

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hash ``tensor`` (on the CPU, unchanged until then)."""
        nbytes = tensor.nbytes
        with self._room:
            self._room.wait_for(lambda: self._pending < _PENDING_BYTES)
            self._pending += nbytes
        self._futures[name] = self._pool.submit(self._hash, tensor)

    def result(self) -> dict[str, str]:
        digests = {name: future.result() for name, future in self._futures.items()}
        self._pool.shutdown()
        return digests

    def _hash(self, tensor: torch.Tensor) -> str:
        try:
            digest = _start_digest(str(tensor.dtype), tuple(tensor.shape))
            raw = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            for begin in range(0, len(raw), _PIECE):
                digest.update(raw[begin : begin + _PIECE])
            return digest.hexdigest()
        finally:
            with self._room:
                self._pending -= tensor.nbytes
                self._room.notify_all()


class Host(Protocol):
    """A patched engine, open for one load on a single rank."""

    name: str

    def tables(self) -> str:
        """Where the Engram tables live, as the server logs it."""

    def plan(self) -> LoadPlan:
        """The plan that the engine's glue makes, without running it."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The engine's own iterator over the checkpoint."""

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Load ``tensor`` into a table, if it is one; the engine's loader does it."""

    def finish(self) -> dict[str, torch.Tensor]:
        """End the load as the engine does; the tables by checkpoint name."""


# Each has a function open_host, a context that yields a Host.
HOSTS = {"sglang": "load_sglang"}


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
    arrived: Callable[[int], None] = lambda nbytes: None,
) -> LoadReport:
    """Load ``checkpoint`` through ``engine`` and compare every byte.

    Args:
        engine: An open engine.
        plan: Its plan for the checkpoint.
        checkpoint: The folder.
        reader: What stands behind InstantTensor, for the report.
        arrived: Called with the bytes of each tensor when it has arrived.
    """
    wanted = {entry.tensor.name: entry for entry in wanted_entries(plan)}
    seconds = {route.value: 0.0 for route in Route}
    digests = Digests()
    weights = engine.weights()
    started = time.perf_counter()
    while True:
        before = time.perf_counter()
        name, tensor = next(weights, (None, None))
        if name is None:
            break
        is_table = engine.take(name, tensor)
        if tensor.is_cuda:
            torch.cuda.synchronize()
        entry = wanted[name]
        seconds[entry.route.value] += time.perf_counter() - before
        if not is_table:
            digests.add(name, tensor.cpu())
        arrived(entry.tensor.nbytes)
    total_seconds = time.perf_counter() - started
    for name, table in engine.finish().items():
        digests.add(name, table.cpu())
    found = digests.result()
    expected, reference = _expected_digests(checkpoint, plan)
    wrong = sorted(
        name
        for name in found.keys() | expected.keys()
        if found.get(name) != expected.get(name)
    )
    options = synth.read_options(checkpoint)
    if options is not None:
        wrong += synth.damaged_files(checkpoint, options)
    whole = hashlib.sha256()
    for name in sorted(found):
        whole.update(f"{name}\0{found[name]}\n".encode())
    return LoadReport(
        engine=engine.name,
        reader=reader,
        routes={
            route.value: RouteReport(
                files=total.files,
                tensors=total.tensors,
                nbytes=total.nbytes,
                seconds=seconds[route.value],
            )
            for route, total in plan.totals().items()
        },
        stock_device_bytes=sum(entry.tensor.nbytes for entry in plan.entries),
        seconds=total_seconds,
        digest=whole.hexdigest(),
        reference=reference,
        wrong=tuple(wrong),
    )


def _expected_digests(checkpoint: Path, plan: LoadPlan) -> tuple[dict[str, str], str]:
    """What each tensor's digest must be, and where that knowledge comes from."""
    options = synth.read_options(checkpoint)
    if options is None:
        return _official_digests(plan), "official safetensors"
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        specs = [spec for shard in synth.layout(options) for spec in shard.tensors]
        digests = pool.map(lambda spec: _synth_digest(options.seed, spec), specs)
        expected = dict(zip((spec.name for spec in specs), digests, strict=True))
    return expected, f"the seed {options.seed} of the synthetic checkpoint"


def _synth_digest(seed: int, spec: TensorHeader) -> str:
    digest = _start_digest(str(synth.torch_dtype(spec.dtype)), spec.shape)
    nbytes = spec.end - spec.begin
    for begin in range(0, nbytes, _PIECE):
        stop = min(begin + _PIECE, nbytes)
        digest.update(synth.content(seed, spec.name, begin, stop))
    return digest.hexdigest()


def _official_digests(plan: LoadPlan) -> dict[str, str]:
    digests = Digests()
    paths: dict[str, list[str]] = {}
    for entry in wanted_entries(plan):
        paths.setdefault(entry.file.path, []).append(entry.tensor.name)
    for path, names in paths.items():
        with safe_open(path, framework="pt") as file:
            for name in names:
                digests.add(name, file.get_tensor(name))
    return digests.result()


def _start_digest(dtype: str, shape: tuple[int, ...]) -> Any:
    """A digest that also covers dtype and shape: the same bytes may lie."""
    return hashlib.sha256(f"{dtype}{tuple(shape)}".encode())


def check_checkpoint(checkpoint: Path) -> None:
    """Refuse early what no loader can open.

    Raises:
        LoadPlanError: not a folder, or no config.json in it.
    """
    if not (checkpoint / "config.json").is_file():
        raise LoadPlanError(
            f"{checkpoint}: no config.json, expected a folder with a checkpoint; "
            "'loadplan synth DIR' makes one"
        )
