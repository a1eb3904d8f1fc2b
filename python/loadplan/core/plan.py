"""The plan: one route for every tensor of a checkpoint, decided from headers alone.

Routes are decided in the order SKIP, HOST, READ, STREAM. A file goes to InstantTensor
whole or not at all: its reads are collective and cannot leave a tensor out.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence

from .header import FileHeader, LoadPlanError, TensorHeader

# A file is still streamed whole when dropping this much of it costs less than giving
# up its collective reads.
MAX_DROPPED_FRACTION = 0.01


class Route(enum.Enum):
    """Where a tensor's bytes go, and through which reader."""

    SKIP = "skip"  # nowhere: this model does not want it
    HOST = "host"  # stays in host memory: a lazy CPU tensor that carries its row source
    READ = "read"  # to the device by positioned reads
    STREAM = "stream"  # to the device by InstantTensor, whole files


@dataclasses.dataclass(frozen=True, slots=True)
class PlannedTensor:
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
    """

    entries: tuple[PlannedTensor, ...]
    promised: frozenset[str]

    def of(self, route: Route) -> list[PlannedTensor]:
        return [entry for entry in self.entries if entry.route is route]

    @property
    def stream_files(self) -> list[str]:
        """The files of the one InstantTensor call, in the order they were given."""
        return list(dict.fromkeys(entry.file.path for entry in self.of(Route.STREAM)))

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
    host_resident_weight_patterns: Iterable[str] = (),
    wanted_weight: Callable[[str], bool] | None = None,
) -> LoadPlan:
    """Decide the route of every tensor in ``files``.

    Args:
        files: The shards that the engine selected, in its order.
        weight_map: The index: tensor name to path of the shard that owns it.
        host_resident_weight_patterns: Substrings of the names of tensors that stay
            in host memory.
        wanted_weight: Tells the names that the model will use; None wants all.

    Raises:
        LoadPlanError: no tensor at all, a name with two owners, an index that does
            not fit the files, or a wanted tensor that torch cannot hold.
    """
    patterns = tuple(host_resident_weight_patterns)
    files = _distinct(files)
    owners = _owners(files, weight_map)
    if not owners:
        raise LoadPlanError(
            f"no tensor in {len(files)} file(s) {[file.path for file in files]}, "
            "expected a checkpoint; is the download complete?"
        )

    def first_route(file: FileHeader, tensor: TensorHeader) -> tuple[Route, str]:
        if owners[tensor.name] is not file:
            return Route.SKIP, f"stale copy; it belongs to {owners[tensor.name].path}"
        if wanted_weight is not None and not wanted_weight(tensor.name):
            return Route.SKIP, "not wanted by this model"
        if tensor.torch_dtype is None:
            raise LoadPlanError(
                f"{file.path}: tensor {tensor.name!r} has dtype {tensor.dtype!r}, "
                "which this torch and safetensors cannot load; use a checkpoint "
                "that stores it packed in bytes"
            )
        if any(pattern in tensor.name for pattern in patterns):
            return Route.HOST, "host-resident"
        return Route.STREAM, ""

    first = {
        file.identity: [(tensor, *first_route(file, tensor)) for tensor in file.tensors]
        for file in files
    }
    obstacles = {
        file.identity: _obstacle(file, first[file.identity], owners) for file in files
    }
    obstacles |= _minority_medium(
        [file for file in files if not obstacles[file.identity]], first
    )
    entries = []
    for file in files:
        obstacle = obstacles[file.identity]
        for tensor, route, reason in first[file.identity]:
            if route is Route.STREAM and obstacle:
                route, reason = Route.READ, obstacle
            entries.append(
                PlannedTensor(file=file, tensor=tensor, route=route, reason=reason)
            )
    promised = frozenset(
        tensor.name
        for file in files
        for tensor in file.tensors
        if wanted_weight is None or wanted_weight(tensor.name)
    )
    return LoadPlan(entries=tuple(entries), promised=promised)


_Routed = list[tuple[TensorHeader, Route, str]]


def _distinct(files: Sequence[FileHeader]) -> list[FileHeader]:
    """Two links to one file are one file."""
    return list({file.identity: file for file in reversed(files)}.values())[::-1]


def _owners(
    files: Sequence[FileHeader], weight_map: Mapping[str, str] | None
) -> dict[str, FileHeader]:
    """Name to the one file whose bytes count: the index's choice, else the only one."""
    by_path = {file.path: file for file in files}
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
            if other is not file:
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


def _obstacle(
    file: FileHeader, routed: _Routed, owners: Mapping[str, FileHeader]
) -> str:
    """Why InstantTensor may not stream ``file`` whole, empty if it may."""
    # Facts about InstantTensor 0.2.2 behind the checks: it refuses a foreign format,
    # dies on some zero-byte tensors and returns the wrong bytes for sub-byte dtypes.
    form = (file.metadata or {}).get("format", "pt")
    if form != "pt":
        return f"metadata format {form!r}"
    dropped = 0
    for tensor, route, _ in routed:
        if route is Route.HOST:
            return "shares its file with host-resident tensors"
        if tensor.is_sub_byte:
            return f"sub-byte dtype {tensor.dtype} in its file"
        if tensor.nbytes == 0:
            return "zero-byte tensor in its file"
        if route is Route.SKIP:
            dropped += tensor.nbytes
            # Names are all that InstantTensor yields: two of one name look alike.
            if owners[tensor.name] is not file:
                return "shares its file with a stale copy"
    if dropped > MAX_DROPPED_FRACTION * file.payload_bytes:
        return "shares its file with unwanted tensors"
    return ""


def _minority_medium(
    files: Sequence[FileHeader], routed: Mapping[tuple[int, int], _Routed]
) -> dict[tuple[int, int], str]:
    """InstantTensor wants all files in memory or all on disk: fewer bytes give way."""
    media: dict[bool, list[FileHeader]] = {True: [], False: []}
    for file in files:
        if any(route is Route.STREAM for _, route, _ in routed[file.identity]):
            media[file.in_memory].append(file)
    if not media[True] or not media[False]:
        return {}
    minority = min(
        (True, False), key=lambda m: sum(file.payload_bytes for file in media[m])
    )
    reason = "in memory, others on disk" if minority else "on disk, others in memory"
    return {file.identity: reason for file in media[minority]}


def _total(entries: Sequence[PlannedTensor]) -> RouteTotal:
    return RouteTotal(
        files=len({entry.file.identity for entry in entries}),
        tensors=len(entries),
        nbytes=sum(entry.tensor.nbytes for entry in entries),
    )
