"""Host memory that ranks need beside their tables, and page cache that they leave.

    python benchmark/host_memory.py FOLDER [--tables 4] [--dense 1] [--ranks 2]
        [--runs 3]

FOLDER is on a disk: files on tmpfs are memory themselves. Sizes are in GiB. Two files
hold a table and dense tensors each, so that the tables stay on the host and the rest is
read by READ. Every rank is a process that owns its share of the rows; the table's
memory is touched before. What counts is how far the resident memory of a rank rises
above that (the kernel's own peak, not samples), mapped pages included. Without a GPU
the device's buffers are host memory and count too.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import mmap
import multiprocessing
import os
import re
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from load_speed import DEVICE, GIB, MIB, drop_caches, host_memory, write_shard

from loadplan.core.header import read_headers
from loadplan.core.loading import decide_routes, run_load
from loadplan.core.plan import Route

PATTERNS = (".engram.embed.",)


def make_checkpoint(folder: Path, tables: float, dense: float) -> list[str]:
    rows = int(tables * GIB / 2 / 264)
    for layer in (1, 14):
        name = f"layers.{layer}.engram.embed"
        tensors = [(f"{name}.weight", "F8_E4M3", (rows, 256))]
        tensors += [(f"{name}.scale", "F8_E8M0", (rows, 8))]
        count = int(dense * GIB / 2 / (32 * MIB))
        tensors += [(f"layers.{layer}.w{i}", "U8", (MIB, 32)) for i in range(count)]
        write_shard(folder / f"mixed-{layer}.safetensors", tensors)
    return sorted(map(str, folder.glob("*.safetensors")))


def status_bytes(field: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(re.search(rf"^{field}:\s+(\d+) kB", text, re.MULTILINE)[1]) * 1024


def cached_bytes(path: str) -> int:
    """How much of a file is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    nbytes = os.path.getsize(path)
    with open(path, "rb") as file:
        pages = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_PRIVATE)
    resident = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    address = ctypes.addressof(ctypes.c_char.from_buffer(pages))
    if libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), resident):
        raise OSError(ctypes.get_errno(), "mincore failed", path)
    return sum(page & 1 for page in resident) * mmap.PAGESIZE


def load_on_rank(
    pipe: Connection, barrier: Any, rank: int, ranks: int, files: list[str], ours: bool
) -> None:
    """Load one rank's rows and all dense tensors; send the rise and the seconds."""
    plan = dataclasses.replace(
        decide_routes(read_headers(files), host_resident_weight_patterns=PATTERNS),
        node_ranks=ranks,
    )
    memory = {}
    for entry in plan.of(Route.HOST):
        rows, tail = entry.tensor.torch_shape[0], entry.tensor.torch_shape[1:]
        begin, end = rows * rank // ranks, rows * (rank + 1) // ranks
        table = host_memory((end - begin) * tail[0]).view(entry.tensor.torch_dtype)
        memory[entry.tensor.name] = begin, table.view(end - begin, *tail)
    barrier.wait()
    Path("/proc/self/clear_refs").write_text("5")  # The peak starts anew.
    before, started = status_bytes("VmRSS"), time.perf_counter()
    reads = []
    for name, tensor in run_load(plan, stream_files=lambda names: (), device=DEVICE):
        if name not in memory:
            continue
        begin, table = memory[name]
        if ours:
            tensor.row_source.read_rows_into(table, begin)
            reads.append((tensor.row_source, begin, len(table)))
        else:
            table.copy_(tensor[begin : begin + len(table)])
    seconds = time.perf_counter() - started
    rise = status_bytes("VmHWM") - before
    barrier.wait()
    for source, begin, rows in reads:
        source.drop_cached(begin, rows)
    pipe.send((rise, seconds))


def measure(files: list[str], ranks: int, ours: bool) -> tuple[int, int, float]:
    """The largest rise of a rank and the page cache left, in bytes; the seconds."""
    drop_caches(Path(files[0]).parent)
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(ranks)
    pipes, processes = [], []
    for rank in range(ranks):
        pipe, other = context.Pipe(duplex=False)
        arguments = (other, barrier, rank, ranks, files, ours)
        processes.append(context.Process(target=load_on_rank, args=arguments))
        processes[-1].start()
        other.close()
        pipes.append(pipe)
    results = [pipe.recv() for pipe in pipes]
    for process in processes:
        process.join()
    rises, seconds = zip(*results, strict=True)
    return max(rises), sum(map(cached_bytes, files)), max(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tables", type=float, default=4, help="GiB")
    parser.add_argument("--dense", type=float, default=1, help="GiB")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True)
    files = make_checkpoint(arguments.folder, arguments.tables, arguments.dense)
    nbytes = sum(map(os.path.getsize, files))
    print(
        f"{os.cpu_count()} cores, torch {torch.__version__}, {DEVICE.type}, "
        f"{arguments.ranks} ranks, {nbytes / GIB:.2f} GiB in {arguments.folder}"
    )
    for name, ours in (("split with a memory map", False), ("loadplan", True)):
        runs = [measure(files, arguments.ranks, ours) for _ in range(arguments.runs)]
        rise, cached, seconds = zip(*runs, strict=True)
        print(
            f"  {name:26} beside the table {min(rise) / MIB:6.0f} - "
            f"{max(rise) / MIB:.0f} MiB a rank, page cache {min(cached) / MIB:6.0f} - "
            f"{max(cached) / MIB:.0f} MiB a node, {min(seconds):.1f} - "
            f"{max(seconds):.1f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
