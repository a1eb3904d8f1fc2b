"""Several GPUs that load one checkpoint together: seconds, and bytes from the disk.

    python benchmark/group_speed.py FOLDER [--ranks 2] [--dense 12] [--tables 4]
        [--runs 3] [--no-small]

FOLDER is where the checkpoint is made (tmpfs or a disk); sizes are in GiB. Every
variant runs in the same processes over the same files, the page cache dropped before
each run. The slowest rank counts; the best run is shown with the slowest beside it.
Bytes are those that the block device really gave, of the last run. Sums of bytes are
compared, so that no variant reads less than another. Needs a GPU for every rank.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from load_speed import GIB, MIB, drop_caches, host_memory, write_shard

from loadplan.core.header import read_headers
from loadplan.core.loading import decide_routes, run_load
from loadplan.core.plan import LoadPlan

NamedTensors = Iterable[tuple[str, torch.Tensor]]


def make_files(folder: Path, arguments: argparse.Namespace) -> None:
    """Large tensors, small ones, and two shards that hold a host table and more."""
    for number in range(arguments.dense):
        names = [(f"large.{number}.w{i}", "U8", (MIB, 32)) for i in range(32)]
        write_shard(folder / f"large-{number:05d}.safetensors", names)
    for number in range(0 if arguments.no_small else 4):
        names = [(f"small.{number}.w{i}", "U8", (3125, 32)) for i in range(5000)]
        write_shard(folder / f"small-{number:05d}.safetensors", names)
    rows = int(arguments.tables * GIB / 2 / 256)
    for layer in (1, 14) if rows else ():
        names = [(f"layers.{layer}.engram.embed.weight", "F8_E4M3", (rows, 256))]
        names += [(f"layers.{layer}.w{i}", "U8", (MIB, 32)) for i in range(8)]
        write_shard(folder / f"mixed-{layer:05d}.safetensors", names)


def disk_bytes(folder: Path) -> int:
    """What the block device below ``folder`` has read so far; 0 in memory."""
    device = folder.stat().st_dev
    number = [str(os.major(device)), str(os.minor(device))]
    for line in Path("/proc/diskstats").read_text().splitlines():
        fields = line.split()
        if fields[:2] == number:
            return int(fields[5]) * 512
    return 0


def instanttensor(
    files: list[str],
    group: dist.ProcessGroup | None,
    names: list[str] | None = None,
    **options: object,
) -> NamedTensors:
    import instanttensor

    if "backend" in options:
        options["backend"] = instanttensor.Backend[options["backend"]]
    if names is not None:
        options |= {"tensor_filter": names, "tensor_name_match_mode": "exact"}
    with instanttensor.safe_open(
        list(files),
        framework="pt",
        device=torch.cuda.current_device(),
        process_group=group,
        **options,
    ) as opened:
        yield from opened.tensors()


class Rank:
    """One rank's view of the benchmark."""

    def __init__(self, folder: Path, arguments: argparse.Namespace):
        self._folder = folder
        self._runs = arguments.runs
        self._device = torch.device("cuda", dist.get_rank())
        self._nccl = dist.group.WORLD
        self._gloo = dist.new_group(backend="gloo")
        self._tables: dict[str, torch.Tensor] = {}

    def say(self, text: str) -> None:
        if dist.get_rank() == 0:
            print(text, flush=True)

    def consume(self, pairs: NamedTensors) -> int:
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for name, tensor in pairs:
            if tensor.is_cuda:
                total += tensor.reshape(-1).view(torch.uint8)[0]
                continue
            table = self._tables[name]
            first = self.first_row(tensor)
            if hasattr(tensor, "row_source"):
                tensor.row_source.read_rows_into(table, first)
            else:
                table.copy_(tensor[first : first + table.shape[0]])
        return int(total)

    def first_row(self, tensor: torch.Tensor) -> int:
        return tensor.shape[0] // dist.get_world_size() * dist.get_rank()

    def planned(self, plan: LoadPlan, group: dist.ProcessGroup | None) -> NamedTensors:
        return run_load(
            plan,
            stream_files=lambda files: instanttensor(files, group),
            device=self._device,
            group=self._gloo,
            device_group=group,
        )

    def measure(self, label: str, run: Callable[[], NamedTensors]) -> float:
        """The best of the runs, in seconds, the slowest rank counting."""
        seconds, sums = [], set()
        for _ in range(self._runs):
            dist.barrier()
            if dist.get_rank() == 0:
                drop_caches(self._folder)
            dist.barrier()
            before = disk_bytes(self._folder)
            torch.cuda.synchronize()
            started = time.perf_counter()
            sums.add(self.consume(run()))
            torch.cuda.synchronize()
            mine = torch.tensor([time.perf_counter() - started], device=self._device)
            dist.all_reduce(mine, dist.ReduceOp.MAX)
            seconds.append(float(mine))
            read = disk_bytes(self._folder) - before
        self.say(
            f"  {label:46} {min(seconds):6.2f} - {max(seconds):6.2f} s"
            f" {read / GIB:7.2f} GiB from disk  sum {sums}"
        )
        return min(seconds)

    def compare(self, title: str, variants: dict[str, Callable[[], NamedTensors]]):
        self.say(title)
        best = {label: self.measure(label, run) for label, run in variants.items()}
        *others, ours = best
        for label in others:
            self.say(
                f"    {ours} is {best[label] / best[ours]:.2f}x as fast as {label}"
            )

    def whole_files(self, pattern: str) -> None:
        """Dense files: who reads them."""
        files = sorted(map(str, self._folder.glob(pattern)))
        if not files:
            return
        headers = read_headers(files)
        nbytes = sum(header.payload_bytes for header in headers)
        everything = decide_routes(headers, reader="read")
        # The best settings that were found for whole files by hand.
        tuned = {"backend": "URING_BUFFERED", "io_depth": 32}
        self.compare(
            f"{pattern}: {nbytes / GIB:.2f} GiB to every GPU",
            {
                "InstantTensor, collective": lambda: instanttensor(files, self._nccl),
                "InstantTensor, collective, tuned": lambda: instanttensor(
                    files, self._nccl, **tuned
                ),
                "InstantTensor, each rank alone": lambda: instanttensor(files, None),
                "READ, each rank alone": lambda: self.planned(everything, None),
                "READ, collective": lambda: self.planned(everything, self._nccl),
            },
        )

    def host_tables(self) -> None:
        """Dense files and mixed shards with tables: the group kept or dropped."""
        files = sorted(map(str, self._folder.glob("large-*")))
        files += sorted(map(str, self._folder.glob("mixed-*")))
        headers = read_headers(files)
        plan = decide_routes(headers, host_resident_weight_patterns=(".engram.",))
        hosts = {e.tensor.name for e in plan.entries if ".engram." in e.tensor.name}
        for entry in plan.entries:
            if entry.tensor.name in hosts:
                rows = entry.tensor.shape[0] // dist.get_world_size()
                memory = host_memory(rows * 256).view(entry.tensor.torch_dtype)
                self._tables[entry.tensor.name] = memory.view(rows, 256)
        if not hosts:
            return
        names = [e.tensor.name for e in plan.entries if e.tensor.name not in hosts]

        def dropped() -> Iterator[tuple[str, torch.Tensor]]:
            """The rule of vLLM 0.33.0: one host tensor, and every rank reads alone."""
            from safetensors import safe_open

            yield from instanttensor(files, None, names)
            for path in files:
                with safe_open(path, framework="pt") as file:
                    for name in hosts.intersection(file.keys()):
                        yield name, file.get_tensor(name)

        self.compare(
            f"Host tables: {sum(h.payload_bytes for h in headers) / GIB:.2f} GiB, "
            f"{len(hosts)} tables",
            {
                "the group dropped for all (vLLM 0.33.0's rule)": dropped,
                "loadplan": lambda: self.planned(plan, self._nccl),
            },
        )
        wanted = {name for name in names if name.endswith(".w7")}
        self._draft(files, headers, wanted)

    def _draft(self, files: list[str], headers: list, wanted: set[str]) -> None:
        plan = decide_routes(headers, wanted_weight=wanted.__contains__)
        everything = {t.name for header in headers for t in header.tensors}
        self._tables.clear()
        self.compare(
            f"A draft of {len(wanted)} of {len(everything)} tensors",
            {
                "InstantTensor's filter, each rank alone": lambda: instanttensor(
                    files, None, sorted(wanted)
                ),
                "loadplan": lambda: self.planned(plan, self._nccl),
            },
        )


def work(rank: int, arguments: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl",
        init_method="tcp://127.0.0.1:29511",
        rank=rank,
        world_size=arguments.ranks,
        device_id=torch.device("cuda", rank),
    )
    mine = Rank(arguments.folder, arguments)
    for pattern in ("large-*", "small-*"):
        mine.whole_files(pattern)
    mine.host_tables()
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--dense", type=int, default=12, help="GiB")
    parser.add_argument("--tables", type=float, default=4, help="GiB")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--no-small", action="store_true")
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        print(f"{torch.cuda.device_count()} GPUs here, expected {arguments.ranks}")
        return 2
    arguments.folder.mkdir(parents=True)
    make_files(arguments.folder, arguments)
    print(
        f"{arguments.ranks} x {torch.cuda.get_device_name()}, {os.cpu_count()} cores, "
        f"{platform.machine()}, torch {torch.__version__}, {arguments.folder}"
    )
    torch.multiprocessing.spawn(work, (arguments,), nprocs=arguments.ranks)
    return 0


if __name__ == "__main__":
    sys.exit(main())
