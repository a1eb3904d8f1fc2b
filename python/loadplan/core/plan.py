"""The plan: one route for every tensor of a checkpoint, decided from headers alone.

Routes are decided in the order SKIP, HOST, READ, STREAM. A file goes to InstantTensor
whole or not at all: its reads are collective and cannot leave a tensor out.
"""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from .header import FileHeader, LoadPlanError, TensorHeader

# A file is still streamed whole when dropping this much of it costs less than giving
# up its collective reads.
MAX_DROPPED_FRACTION = 0.01

# Why some files cannot be streamed whole, by path, whatever their routes are.
Obstacles = Callable[[Sequence[FileHeader]], Mapping[str, str]]


class UnloadableTensorError(LoadPlanError):
    """A wanted tensor of the file ``path`` has a dtype that torch cannot hold."""

    def __init__(self, path: str, text: str):
        super().__init__(f"{path}: {text}")
        self.path = path


class Route(enum.Enum):
    """Where a tensor's bytes go, and through which reader."""

    SKIP = "skip"  # nowhere: this model does not want it
    HOST = "host"  # stays in host memory: a lazy CPU tensor
    READ = "read"  # to the device, selected from its file
    STREAM = "stream"  # to the device by InstantTensor, whole files


class PlannedTensor(NamedTuple):
    """A tensor of one file and its route; ``reason`` is empty for STREAM."""

    file: FileHeader
    tensor: TensorHeader
    route: Route
    reason: str


@dataclasses.dataclass(frozen=True, slots=True)
class RouteTotal:
    """What one route carries: how many files and tensors, how many bytes."""

    files: int
    tensors: int
    nbytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class LoadPlan:
    """Every tensor of the selected files exactly once, in file and byte order.

    ``promised`` holds the names that the model will get, taken from the headers and the
    model's own filter, not from the routes: what a load is checked against.
    ``node_ranks`` is how many ranks of this node carry the plan out at once.
    """

    entries: tuple[PlannedTensor, ...]
    promised: frozenset[str]
    node_ranks: int = 1

    def of(self, route: Route) -> list[PlannedTensor]:
        return [entry for entry in self.entries if entry.route is route]

    def streamed(self) -> list[FileHeader]:
        """The files of the one InstantTensor call, in the order they were given."""
        files = {entry.file.path: entry.file for entry in self.of(Route.STREAM)}
        return list(files.values())

    @property
    def stream_files(self) -> list[str]:
        return [file.path for file in self.streamed()]

    def totals(self) -> dict[Route, RouteTotal]:
        return {route: _total(self.of(route)) for route in Route}

    def departures(self) -> dict[tuple[Route, str], RouteTotal]:
        """What does not take the fast path, by route and reason."""
        groups: dict[tuple[Route, str], list[PlannedTensor]] = {}
        for entry in self.entries:
            if entry.route is not Route.STREAM:
                groups.setdefault((entry.route, entry.reason), []).append(entry)
        return {key: _total(entries) for key, entries in groups.items()}


def make_plan(
    files: Sequence[FileHeader],
    *,
    weight_map: Mapping[str, str] | None = None,
    host_resident_weight_patterns: Iterable[str | re.Pattern[str]] = (),
    wanted_weight: Callable[[str], bool] | None = None,
    kept: Mapping[str, str] | None = None,
    obstacles: Obstacles | None = None,
) -> LoadPlan:
    """Decide the route of every tensor in ``files``, given in the engine's order.

    ``weight_map`` is the index, tensor name to path. The patterns are substrings of the
    names that stay in host memory, or regular expressions that are found in them;
    ``kept`` names others that stay there, with the reason. ``wanted_weight`` tells the
    names that the model will use, None wants all. ``obstacles`` tells which files
    InstantTensor cannot stream for a reason of its own.

    Raises:
        LoadPlanError: no tensor at all, a name with two owners, or an index that does
            not fit the files.
        UnloadableTensorError: a wanted tensor that torch cannot hold.
    """
    on_host = _host_rule(host_resident_weight_patterns, kept or {})
    names = {tensor.name for file in files for tensor in file.tensors}
    # Asked once a name, before anything is decided: what a load is checked against.
    promised = frozenset(
        names if wanted_weight is None else filter(wanted_weight, names)
    )
    by_path = _distinct(files)
    files = list({id(file): file for file in by_path.values()}.values())
    owners = _owners(files, by_path, weight_map, promised)
    if not owners:
        raise LoadPlanError(
            f"no tensor in {len(files)} file(s) {[file.path for file in files]}, "
            "expected a checkpoint; is the download complete?"
        )
    routed = {
        file.path: _first_routes(file, owners, promised, on_host) for file in files
    }
    hindered = {file.path: _obstacle(file, routed[file.path]) for file in files}
    if obstacles is not None:
        whole = [
            file
            for file in files
            if not hindered[file.path]
            and any(entry.route is Route.STREAM for entry in routed[file.path])
        ]
        hindered |= obstacles(whole)
    entries: list[PlannedTensor] = []
    for file in files:
        for entry in routed[file.path]:
            if hindered[file.path] and entry.route is Route.STREAM:
                entry = entry._replace(route=Route.READ, reason=hindered[file.path])
            entries.append(entry)
    return LoadPlan(entries=tuple(entries), promised=promised)


def _host_rule(
    patterns: Iterable[str | re.Pattern[str]], kept: Mapping[str, str]
) -> Callable[[str], str]:
    """Why a name stays on the host, empty if it does not."""
    given = [patterns] if isinstance(patterns, str | bytes) else list(patterns)
    plain = [pattern for pattern in given if isinstance(pattern, str)]
    # Not re.Pattern alone: an engine may compile them by a library of its own.
    compiled = [pattern for pattern in given if hasattr(pattern, "search")]
    if isinstance(patterns, str) or len(plain) + len(compiled) < len(given):
        raise LoadPlanError(
            f"host_resident_weight_patterns is {patterns!r}, expected a tuple of "
            "strings or compiled patterns; every letter of a string would be a pattern"
        )
    if "" in plain:
        raise LoadPlanError(
            f"host_resident_weight_patterns is {patterns!r}, expected substrings of "
            "names; an empty one would keep every tensor on the host"
        )

    def reason(name: str) -> str:
        if any(text in name for text in plain):
            return "host-resident"
        if any(pattern.search(name) for pattern in compiled):
            return "host-resident"
        return kept.get(name, "")

    return reason


def _distinct(files: Sequence[FileHeader]) -> dict[str, FileHeader]:
    """By path, the one file that stands for all links to it: the same on every rank."""
    kept: dict[tuple[object, ...], FileHeader] = {}
    for file in sorted(files, key=lambda file: file.path):
        # Device and inode alone do not tell: some network file systems invent them.
        kept.setdefault((file.identity, file.size, file.tensors), file)
    return {f.path: kept[f.identity, f.size, f.tensors] for f in files}


def _owners(
    files: Sequence[FileHeader],
    by_path: Mapping[str, FileHeader],
    weight_map: Mapping[str, str] | None,
    promised: frozenset[str],
) -> dict[str, FileHeader]:
    """Name to the one file whose bytes count: the index's choice, else the only one."""
    owners: dict[str, FileHeader] = {}
    indexed = {
        name: by_path[path]
        for name, path in (weight_map or {}).items()
        if path in by_path
    }
    for file in files:
        for tensor in file.tensors:
            if indexed.get(tensor.name, file) is not file:
                continue
            other = owners.setdefault(tensor.name, file)
            # Which copy of an unwanted one counts is nobody's concern.
            if other is not file and tensor.name in promised:
                raise LoadPlanError(
                    f"tensor {tensor.name!r} is in {other.path} and in {file.path} and "
                    "no index says which one counts; remove one file or restore the "
                    "index"
                )
    for name, file in indexed.items():
        if name not in owners:
            raise LoadPlanError(
                f"{file.path}: the index promises tensor {name!r} here and the file "
                "does not hold it (a stale index); download index and shards again"
            )
    return owners


def _first_routes(
    file: FileHeader,
    owners: Mapping[str, FileHeader],
    promised: frozenset[str],
    on_host: Callable[[str], str],
) -> list[PlannedTensor]:
    """SKIP and HOST, decided name by name; all others may still be streamed."""
    entries = []
    for tensor in file.tensors:
        route, reason = Route.STREAM, ""
        if tensor.name not in promised:
            route, reason = Route.SKIP, "not wanted by this model"
        elif owners[tensor.name] is not file:
            belongs = owners[tensor.name].path
            route, reason = Route.SKIP, f"stale copy; it belongs to {belongs}"
        elif tensor.torch_dtype is None:
            raise UnloadableTensorError(
                file.path,
                f"tensor {tensor.name!r} has dtype {tensor.dtype!r}, which this torch "
                "and safetensors cannot load; use a checkpoint that stores it packed "
                "in bytes",
            )
        elif reason := on_host(tensor.name):
            route = Route.HOST
        entries.append(PlannedTensor(file, tensor, route, reason))
    return entries


def _obstacle(file: FileHeader, entries: Sequence[PlannedTensor]) -> str:
    """Why InstantTensor may not stream ``file`` whole, as far as the routes tell."""
    dropped = 0
    for entry in entries:
        if entry.route is Route.HOST:
            return "shares its file with tensors that stay on the host"
        if entry.route is Route.SKIP:
            dropped += entry.tensor.nbytes
            # Names are all that InstantTensor yields: two of one name look alike.
            if entry.reason.startswith("stale copy"):
                return "shares its file with a stale copy"
    if dropped > MAX_DROPPED_FRACTION * file.payload_bytes:
        return "shares its file with unwanted tensors"
    return ""


def _total(entries: Sequence[PlannedTensor]) -> RouteTotal:
    return RouteTotal(
        files=len({entry.file.path for entry in entries}),
        tensors=len(entries),
        nbytes=sum(entry.tensor.nbytes for entry in entries),
    )
