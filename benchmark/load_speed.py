"""Host tables, selected tensors and whole loads beside the other ways to load them.

    python benchmark/load_speed.py FOLDER [--tables 16.5] [--dense 12] [--runs 3]
        [--only tables|selections|whole]

FOLDER is where the checkpoints are made (tmpfs or a disk); sizes are in GiB. Every
variant runs in this one process over the same files, the page cache dropped before each
run; the best run counts and the slowest is shown beside it. Needs a GPU for all but the
tables. Sums of bytes are compared, so that no variant reads less than another.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import json
import mmap
import os
import platform
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from loadplan.core.header import read_headers
from loadplan.core.loading import decide_routes, run_load
from loadplan.core.plan import LoadPlan, PlannedTensor, Route
from loadplan.core.read import OpenFile, bytes_of, reader_threads
from loadplan.core.spans import read_tensors

GIB, MIB = 1 << 30, 1 << 20
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


def write_shard(path: Path, tensors: list[tuple[str, str, tuple[int, int]]]) -> None:
    """A shard of two-dimensional one-byte tensors with content that never repeats."""
    header, end = {}, 0
    for name, dtype, shape in tensors:
        begin, end = end, end + shape[0] * shape[1]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    noise = torch.randint(256, (257 * MIB,), dtype=torch.uint8).numpy().data
    with open(path, "wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for number, at in enumerate(range(0, end, 256 * MIB)):
            piece = noise[number % MIB :][: min(256 * MIB, end - at)]
            while piece:
                piece = piece[file.write(piece) :]
        os.fsync(file.fileno())


def drop_caches(folder: Path) -> None:
    for path in folder.rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    with contextlib.suppress(OSError):
        Path("/proc/sys/vm/drop_caches").write_text("3")


def measure(
    folder: Path,
    nbytes: int,
    variants: dict[str, Callable[[], int]],
    runs: int,
) -> dict[str, float]:
    """Best seconds of each variant; prints them with the spread and the rate."""
    best, sums = {}, {}
    for name, run in variants.items() if runs else ():
        seconds = []
        for _ in range(runs):
            drop_caches(folder)
            started = time.perf_counter()
            sums[name] = run()
            if ON_GPU:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started)
        best[name] = min(seconds)
        rate = nbytes / GIB / best[name]
        print(
            f"  {name:44} {best[name]:7.2f} - {max(seconds):6.2f} s {rate:7.2f} GiB/s",
            flush=True,
        )
    assert len({s for s in sums.values() if s}) <= 1, sums
    return best


def ratios(best: dict[str, float], ours: str) -> None:
    for name, seconds in best.items():
        if name != ours:
            print(f"    {ours} is {seconds / best[ours]:.2f}x as fast as {name}")


def host_memory(nbytes: int) -> torch.Tensor:
    """Anonymous memory on huge pages, touched before, as a host table has it."""
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8).zero_()


def tables(folder: Path, gib: float, runs: int) -> dict[str, torch.Tensor]:
    """The rows of two Engram layers into host memory."""
    folder.mkdir(parents=True)
    rows = int(gib * GIB / 2 / 264)
    for layer in (1, 14):
        prefix = f"layers.{layer}.engram.embed."
        shapes = [(f"{prefix}weight", "F8_E4M3", (rows, 256))]
        shapes += [(f"{prefix}scale", "F8_E8M0", (rows, 8))]
        write_shard(folder / f"engram-{layer}.safetensors", shapes)
    headers = read_headers(sorted(map(str, folder.glob("*.safetensors"))))
    plan = decide_routes(headers, host_resident_weight_patterns=(".engram.",))
    memory = {
        e.tensor.name: host_memory(e.tensor.nbytes)
        .view(e.tensor.torch_dtype)
        .view(e.tensor.torch_shape)
        for e in plan.entries
    }
    nbytes = sum(t.nbytes for t in memory.values())

    def marks() -> int:
        return sum(int(bytes_of(t)[i]) for t in memory.values() for i in (0, -1))

    def with_pool(load: Callable[[str, torch.Tensor], None]) -> int:
        """As load_weights does: weight loaders of host tensors run in threads."""
        pairs = list(run_load(plan, stream_files=lambda files: (), device=DEVICE))
        with concurrent.futures.ThreadPoolExecutor() as pool:
            list(pool.map(lambda pair: load(*pair), pairs))
        return marks()

    def chunked(threads: int, chunk: int) -> int:
        with concurrent.futures.ThreadPoolExecutor(threads) as pool:
            for entry in plan.entries:
                file, begin = OpenFile(entry.file), entry.tensor.begin
                buffer = bytes_of(memory[entry.tensor.name])
                list(
                    pool.map(
                        lambda at, f=file, b=buffer, o=begin: f.read_into(
                            b[at : at + chunk], o + at
                        ),
                        range(0, len(buffer), chunk),
                    )
                )
        return marks()

    print(f"Tables: {nbytes / GIB:.2f} GiB of rows into host memory")
    ours = "loadplan: row source"
    best = measure(
        folder,
        nbytes,
        {
            "split with a memory map (published)": lambda: with_pool(
                lambda name, tensor: memory[name].copy_(tensor)
            ),
            "split, 8 threads x 64 MiB (its follow-up)": lambda: chunked(8, 64 * MIB),
            "raw reads, 16 threads x 8 MiB": lambda: chunked(16, 8 * MIB),
            ours: lambda: with_pool(
                lambda name, tensor: tensor.row_source.read_rows_into(memory[name], 0)
            ),
        },
        runs,
    )
    ratios(best, ours)
    return memory


def consume(pairs: Iterator[tuple[str, torch.Tensor]]) -> int:
    """Use each tensor on the device as it comes; a sum that depends on all of them."""
    total = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _, tensor in pairs:
        total += tensor.reshape(-1).view(torch.uint8)[0]
    return int(total)


def instanttensor_filtered(
    files: list[str], names: list[str] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    import instanttensor

    options = {}
    if names is not None:
        options = {"tensor_filter": names, "tensor_name_match_mode": "exact"}
    with instanttensor.safe_open(
        list(files), framework="pt", device=0, **options
    ) as opened:
        yield from opened.tensors()


def lazy(files: list[str], names: set[str]) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                if name in names:
                    yield name, file.get_tensor(name).to(DEVICE)


def selections(folder: Path, gib: int, runs: int) -> None:
    """Selected tensors to the device: large, small, and small ones far apart."""
    for kind, count, size in (("large", 32, 32 * MIB), ("small", 5000, 100_000)):
        if kind == "small" and not runs:
            continue
        here = folder / kind
        here.mkdir(parents=True)
        for number in range(gib if kind == "large" else 4):
            shape = (size // 32, 32)
            names = [(f"{kind}.{number}.w{i}", "U8", shape) for i in range(count)]
            write_shard(here / f"model-{number:05d}.safetensors", names)
        files = sorted(map(str, here.glob("*.safetensors")))
        everything = [
            PlannedTensor(header, tensor, Route.READ, "")
            for header in read_headers(files)
            for tensor in header.tensors
        ]
        compare(f"{kind} tensors, all", here, everything, None, runs)
        tenth = everything[::10]
        names = [entry.tensor.name for entry in tenth]
        compare(f"{kind} tensors, every tenth", here, tenth, names, runs)


def compare(
    label: str,
    folder: Path,
    entries: list[PlannedTensor],
    selected: list[str] | None,
    runs: int,
) -> None:
    """The three ways to get ``entries`` to the device; ``selected`` None: all."""
    files = sorted(map(str, folder.glob("*.safetensors")))
    names = {entry.tensor.name for entry in entries}
    nbytes = sum(entry.tensor.nbytes for entry in entries)
    print(f"{label.capitalize()}: {len(entries)} of {nbytes / GIB:.2f} GiB")
    ours = "loadplan: READ"
    best = measure(
        folder,
        nbytes,
        {
            "InstantTensor": lambda: consume(instanttensor_filtered(files, selected)),
            "lazy safetensors": lambda: consume(lazy(files, names)),
            ours: lambda: consume(read_tensors(entries, DEVICE)),
        },
        runs,
    )
    ratios(best, ours)


def whole(folder: Path, memory: dict[str, torch.Tensor], runs: int) -> None:
    """Dense files to the device and tables to the host, in one load."""
    files = sorted(
        str(path)
        for path in folder.rglob("*.safetensors")
        if path.parent.name in ("large", "tables")
    )
    headers = read_headers(files)
    nbytes = sum(header.payload_bytes for header in headers)
    plan = decide_routes(headers, host_resident_weight_patterns=(".engram.",))
    reading = decide_routes(
        headers, host_resident_weight_patterns=(".engram.",), reader="read"
    )

    def take(name: str, tensor: torch.Tensor, total: torch.Tensor) -> None:
        if name not in memory:
            total += tensor.reshape(-1).view(torch.uint8)[0]
        elif hasattr(tensor, "row_source"):
            tensor.row_source.read_rows_into(memory[name], 0)
        else:
            memory[name].copy_(tensor)

    def planned(plan: LoadPlan) -> int:
        total = torch.zeros((), dtype=torch.int64, device=DEVICE)
        for name, tensor in run_load(
            plan,
            stream_files=lambda names: instanttensor_filtered(names, None),
            device=DEVICE,
        ):
            take(name, tensor, total)
        return int(total)

    def default() -> int:
        total = torch.zeros((), dtype=torch.int64, device=DEVICE)

        def load(path: str) -> None:
            with safe_open(path, framework="pt") as file:
                for name in file.offset_keys():
                    tensor = file.get_tensor(name)
                    if name not in memory:
                        tensor = tensor.to(DEVICE)
                    take(name, tensor, total)

        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(load, files))
        return int(total)

    print(f"Whole load: {nbytes / GIB:.2f} GiB")
    ours = "loadplan"
    best = measure(
        folder,
        nbytes,
        {
            "safetensors with a memory map, 8 threads": default,
            "loadplan, LOADPLAN_STREAM_READER=read": lambda: planned(reading),
            ours: lambda: planned(plan),
        },
        runs,
    )
    ratios(best, ours)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", type=float, default=16.5, help="GiB")
    parser.add_argument("--dense", type=int, default=12, help="GiB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", choices=("tables", "selections", "whole"))
    arguments = parser.parse_args()
    gpu = torch.cuda.get_device_name() if ON_GPU else "no GPU"
    threads = reader_threads()
    print(
        f"{gpu}, {os.cpu_count()} cores, {platform.machine()}, torch "
        f"{torch.__version__}, {threads} reader threads, {arguments.folder}"
    )
    # What is not measured is still made: the whole load takes tables and large tensors.
    runs = {
        part: arguments.runs if arguments.only in (None, part) else 0
        for part in ("tables", "selections", "whole")
    }
    memory = tables(arguments.folder / "tables", arguments.tables, runs["tables"])
    if ON_GPU:
        selections(arguments.folder, arguments.dense, runs["selections"])
        whole(arguments.folder, memory, runs["whole"])


if __name__ == "__main__":
    main()
