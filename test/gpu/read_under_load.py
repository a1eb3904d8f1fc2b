"""READ on a real GPU while other streams keep its memory busy: compares every byte.

    python test/gpu/read_under_load.py [--rounds N] [--ranks N]

A buffer that is allocated on one stream and filled on another without waiting gives
wrong bytes only under load. With several ranks, each on a GPU of its own, they read
together; at the end the file of the last rank is cut, and all must hear of it. Exit 0:
all bytes right; 1: some differ; 2: too few GPUs.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from multiprocessing import SimpleQueue
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test" / "loadplan")]

from files import BITS, write_shard  # noqa: E402

from loadplan.core.broadcast import fill_together  # noqa: E402
from loadplan.core.header import read_header  # noqa: E402
from loadplan.core.plan import PlannedTensor, Route  # noqa: E402
from loadplan.core.ranks import PeerFailure  # noqa: E402
from loadplan.core.read import OpenFile, ShortFileError  # noqa: E402
from loadplan.core.spans import fill_spans, read_tensors  # noqa: E402

MIB = 1 << 20


def tensors(number: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Large, small, odd and empty ones, so that spans and pieces are crossed."""
    found = [(f"{number}.byte", "I8", (1,)), (f"{number}.scalar", "F32", ())]
    found += [(f"{number}.large{i}", "U8", ((9 + i) * MIB + i,)) for i in range(4)]
    found += [(f"{number}.small{i}", "BF16", (37, 11 + i)) for i in range(300)]
    found += [(f"{number}.empty", "U8", (0, 4)), (f"{number}.huge", "U8", (70 * MIB,))]
    return found


def read_rounds(
    entries: list[PlannedTensor],
    expected: dict[str, torch.Tensor],
    rounds: int,
    fill: Callable[[list, torch.device], Iterator],
) -> int:
    """How many tensors came out wrong, over all rounds."""
    device = torch.device("cuda", torch.cuda.current_device())
    busy = [torch.cuda.Stream(device) for _ in range(3)]
    wrong = 0
    for _ in range(rounds):
        kept = {}
        for name, tensor in read_tensors(entries, device, fill):
            for stream in busy:
                with torch.cuda.stream(stream):
                    scratch = torch.empty(16 * MIB, device=device).normal_()
                    scratch.mul_(scratch)
            # Used at once on the consumer's stream, then kept or dropped by turns.
            copy = tensor.reshape(-1).view(torch.uint8).clone()
            if len(kept) % 2:
                kept[name] = tensor.reshape(-1).view(torch.uint8)
            else:
                kept[name] = copy
        torch.cuda.synchronize()
        wrong += sum(
            not torch.equal(kept[name].cpu(), content)
            for name, content in expected.items()
        )
    return wrong


def make_files(folder: Path) -> None:
    for number in range(4):
        shard = tensors(number)
        size = sum(math.prod(s) * BITS[dtype] // 8 for _, dtype, s in shard)
        noise = torch.randint(256, (size,), dtype=torch.uint8).numpy().tobytes()
        write_shard(folder / f"{number}.safetensors", shard, payload=noise)


def work(rank: int, ranks: int, rounds: int, folder: str, failed: SimpleQueue) -> None:
    torch.cuda.set_device(rank)
    entries, expected = [], {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        header = read_header(str(path))
        raw = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        for tensor in header.tensors:
            entries.append(PlannedTensor(header, tensor, Route.READ, ""))
            expected[tensor.name] = raw[tensor.begin : tensor.end]
    fill = fill_spans
    if ranks > 1:
        dist.init_process_group(
            "nccl",
            init_method="tcp://127.0.0.1:29512",
            rank=rank,
            world_size=ranks,
            device_id=torch.device("cuda", rank),
        )
        fill = functools.partial(fill_together, group=dist.group.WORLD)
    wrong = read_rounds(entries, expected, rounds, fill)
    print(f"rank {rank}: {rounds} rounds of {len(expected)} tensors: {wrong} wrong")
    if ranks > 1:
        wrong += not hears_of_a_cut_file(entries, rank, ranks, fill)
    failed.put(wrong)


def hears_of_a_cut_file(
    entries: list[PlannedTensor], rank: int, ranks: int, fill: Callable
) -> bool:
    """Whether all ranks raise when the last rank's file ends early."""

    def read_into(self: OpenFile, buffer: memoryview, offset: int) -> None:
        raise ShortFileError(f"{self.path}: cut for rank {rank}")

    dist.barrier()
    if rank == ranks - 1:
        OpenFile.read_into = read_into
    expected = ShortFileError if rank == ranks - 1 else PeerFailure
    try:
        for _ in read_tensors(entries, torch.device("cuda", rank), fill):
            pass
    except expected as error:
        print(f"rank {rank} stopped: {error}")
        return True
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ranks", type=int, default=1)
    arguments = parser.parse_args()
    if torch.cuda.device_count() < arguments.ranks:
        print(f"{torch.cuda.device_count()} GPUs here, expected {arguments.ranks}")
        return 2
    failed = torch.multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        torch.multiprocessing.spawn(
            work,
            (arguments.ranks, arguments.rounds, folder, failed),
            nprocs=arguments.ranks,
        )
    return int(any(failed.get() for _ in range(arguments.ranks)))


if __name__ == "__main__":
    sys.exit(main())
