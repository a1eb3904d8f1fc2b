"""The plan: one route for every tensor of a checkpoint, decided from headers alone.

Routes are decided in the order SKIP, HOST, READ, STREAM. A file goes to InstantTensor
whole or not at all: its reads are collective and cannot leave a tensor out.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from .header import FileHeader, LoadPlanError, TensorHeader
from .ring import ring_bytes

# A file is still streamed whole when dropping this much of it costs less than giving
# up its collective reads.
MAX_DROPPED_FRACTION = 0.01


class UnloadableTensorError(LoadPlanError):
    """A wanted tensor of the file ``path`` has a dtype that torch cannot hold."""

    def __init__(self, path: str, text: str):
        super().__init__(f"{path}: {text}")
        self.path = path


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

    def streamed(self) -> list[FileHeader]:
        """The files of the one InstantTensor call, in the order they were given."""
        files = {entry.file.path: entry.file for entry in self.of(Route.STREAM)}
        return list(files.values())

    @property
    def stream_files(self) -> list[str]:
        return [file.path for file in self.streamed()]

    def file_digests(self) -> dict[str, str]:
        """By path, a digest of size, header and routes: equal on ranks that agree."""
        texts: dict[str, list[str]] = {}
        for entry in self.entries:
            tensor = entry.tensor
            texts.setdefault(entry.file.path, [str(entry.file.size)]).append(
                f"{tensor.name} {tensor.dtype} {tensor.shape} {tensor.begin} "
                f"{entry.route.value}"
            )
        return {
            path: hashlib.sha256("\n".join(lines).encode()).hexdigest()
            for path, lines in texts.items()
        }

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
    rank_filtered_weight: Callable[[str], bool] | None = None,
    device_budget: int | None = None,
    old_reader: bool = False,
    stream: bool = True,
) -> LoadPlan:
    """Decide the route of every tensor in ``files``, given in the engine's order.

    ``weight_map`` is the index, tensor name to path. The patterns are substrings of the
    names that stay in host memory, or regular expressions that are found in them;
    ``wanted_weight`` tells the names that the model will use, None wants all.
    ``rank_filtered_weight`` tells those that some ranks leave out, None means none.
    ``device_budget`` is the most bytes that InstantTensor's ring may take, None sets no
    limit; ``old_reader`` says that InstantTensor is older than 0.2 on some rank.
    Without ``stream`` what would be STREAM is READ.

    Raises:
        LoadPlanError: no tensor at all, a name with two owners, or an index that does
            not fit the files.
        UnloadableTensorError: a wanted tensor that torch cannot hold.
    """
    if isinstance(host_resident_weight_patterns, str):
        raise LoadPlanError(
            f"host_resident_weight_patterns is {host_resident_weight_patterns!r}, "
            "expected a tuple of strings; every letter would be a pattern"
        )
    patterns = [
        re.compile(re.escape(pattern)) if isinstance(pattern, str) else pattern
        for pattern in host_resident_weight_patterns
    ]
    # Before anything is decided: what a load is checked against.
    promised = frozenset(
        tensor.name
        for file in files
        for tensor in file.tensors
        if wanted_weight is None or wanted_weight(tensor.name)
    )
    by_path = _distinct(files)
    files = list({id(file): file for file in by_path.values()}.values())
    owners = _owners(files, by_path, weight_map)
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
            raise UnloadableTensorError(
                file.path,
                f"tensor {tensor.name!r} has dtype {tensor.dtype!r}, which this torch "
                "and safetensors cannot load; use a checkpoint that stores it packed "
                "in bytes",
            )
        if any(pattern.search(tensor.name) for pattern in patterns):
            return Route.HOST, "host-resident"
        return Route.STREAM, ""

    routed = {
        file.path: [(tensor, *first_route(file, tensor)) for tensor in file.tensors]
        for file in files
    }

    def obstacles() -> dict[str, str]:
        if not stream:
            return {file.path: "LOADPLAN_STREAM_READER=read" for file in files}
        found = {
            file.path: _obstacle(
                file, routed[file.path], owners, old_reader, rank_filtered_weight
            )
            for file in files
        }
        return found | _minority_medium(
            [file for file in files if not found[file.path]], routed
        )

    hindered = obstacles()
    if device_budget is not None:
        while _keep_too_large(files, routed, hindered, device_budget):
            hindered = obstacles()
    entries = []
    for file in files:
        obstacle = hindered[file.path]
        for tensor, route, reason in routed[file.path]:
            if route is Route.STREAM and obstacle:
                route, reason = Route.READ, obstacle
            entries.append(
                PlannedTensor(file=file, tensor=tensor, route=route, reason=reason)
            )
    return LoadPlan(entries=tuple(entries), promised=promised)


_Routed = list[tuple[TensorHeader, Route, str]]


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
    file: FileHeader,
    routed: _Routed,
    owners: Mapping[str, FileHeader],
    old_reader: bool,
    rank_filtered_weight: Callable[[str], bool] | None,
) -> str:
    """Why InstantTensor may not stream ``file`` whole, empty if it may."""
    # Facts about InstantTensor 0.2.2 behind the checks: it refuses a foreign format,
    # dies on some zero-byte tensors and returns the wrong bytes for sub-byte dtypes.
    # 0.1.9 also refuses tensors that are not aligned and the FNUZ dtypes.
    if file.in_memory is None:
        return "in memory for some ranks, on disk for others"
    form = (file.metadata or {}).get("format", "pt")
    if form != "pt":
        return f"metadata format {form!r}"
    dropped = 0
    for tensor, route, _ in routed:
        if route is Route.HOST:
            return "shares its file with tensors that stay on the host"
        if rank_filtered_weight is not None and rank_filtered_weight(tensor.name):
            return "shares its file with weights that some ranks leave out"
        if tensor.is_sub_byte:
            return f"sub-byte dtype {tensor.dtype} in its file"
        if tensor.nbytes == 0:
            return "zero-byte tensor in its file"
        if old_reader and tensor.dtype.endswith("FNUZ"):
            return f"dtype {tensor.dtype}, which InstantTensor before 0.2 refuses"
        if old_reader and tensor.begin % (tensor.element_bits // 8):
            return (
                "a tensor that is not aligned, which InstantTensor before 0.2 refuses"
            )
        if route is Route.SKIP:
            dropped += tensor.nbytes
            # Names are all that InstantTensor yields: two of one name look alike.
            if owners[tensor.name] is not file:
                return "shares its file with a stale copy"
    if dropped > MAX_DROPPED_FRACTION * file.payload_bytes:
        return "shares its file with unwanted tensors"
    return ""


def _minority_medium(
    files: Sequence[FileHeader], routed: Mapping[str, _Routed]
) -> dict[str, str]:
    """InstantTensor wants all files in memory or all on disk: fewer bytes give way."""
    media: dict[bool, list[FileHeader]] = {True: [], False: []}
    for file in files:
        if any(route is Route.STREAM for _, route, _ in routed[file.path]):
            media[file.in_memory].append(file)
    if not media[True] or not media[False]:
        return {}
    minority = min(
        (True, False), key=lambda m: sum(file.payload_bytes for file in media[m])
    )
    reason = "in memory, others on disk" if minority else "on disk, others in memory"
    return {file.path: reason for file in media[minority]}


def _keep_too_large(
    files: Sequence[FileHeader],
    routed: Mapping[str, _Routed],
    hindered: Mapping[str, str],
    budget: int,
) -> bool:
    """Route to HOST what the device cannot take whole; whether there was something.

    The plan sends none larger than the budget there. Where InstantTensor's ring for
    the rest would be too large, the largest make way, all of one size at once.
    """
    on_device = [
        (tensor.nbytes, file.path, index, file)
        for file in files
        for index, (tensor, route, _) in enumerate(routed[file.path])
        if route is Route.STREAM
    ]
    too_large = [entry for entry in on_device if entry[0] > budget]
    if not too_large:
        # The library takes files by name and tensors by offset.
        streamed = [entry for entry in on_device if not hindered[entry[3].path]]
        streamed.sort(key=lambda entry: entry[1:3])
        if ring_bytes([entry[0] for entry in streamed]) > budget:
            largest = max(entry[0] for entry in streamed)
            too_large = [entry for entry in streamed if entry[0] == largest]
    for nbytes, _, index, file in too_large:
        tensor = routed[file.path][index][0]
        reason = f"{nbytes} B, more than the device has room for at once"
        routed[file.path][index] = (tensor, Route.HOST, reason)
    return bool(too_large)


def _total(entries: Sequence[PlannedTensor]) -> RouteTotal:
    return RouteTotal(
        files=len({entry.file.path for entry in entries}),
        tensors=len(entries),
        nbytes=sum(entry.tensor.nbytes for entry in entries),
    )
