"""READ on a real GPU while other streams keep its memory busy: compares every byte.

    python test/gpu/read_under_load.py [--rounds N]

A buffer that is allocated on one stream and filled on another without waiting gives
wrong bytes only under load. Exit 0: all bytes right; 1: some differ; 2: no GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "python"), str(ROOT / "test" / "loadplan")]

from files import BITS, write_shard  # noqa: E402

from loadplan.core import Route, read_header  # noqa: E402
from loadplan.core.plan import PlannedTensor  # noqa: E402
from loadplan.core.spans import read_tensors  # noqa: E402

MIB = 1 << 20


def tensors(number: int) -> list[tuple[str, str, tuple[int, ...]]]:
    """Large, small, odd and empty ones, so that spans and pieces are crossed."""
    found = [(f"{number}.byte", "I8", (1,)), (f"{number}.scalar", "F32", ())]
    found += [(f"{number}.large{i}", "U8", ((9 + i) * MIB + i,)) for i in range(4)]
    found += [(f"{number}.small{i}", "BF16", (37, 11 + i)) for i in range(300)]
    found += [(f"{number}.empty", "U8", (0, 4)), (f"{number}.huge", "U8", (70 * MIB,))]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    rounds = parser.parse_args().rounds
    if not torch.cuda.is_available():
        print("no GPU here")
        return 2
    device = torch.device("cuda", 0)
    busy = [torch.cuda.Stream(device) for _ in range(3)]
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        entries, expected = [], {}
        for number in range(4):
            shard = tensors(number)
            size = sum(math.prod(s) * BITS[dtype] // 8 for _, dtype, s in shard)
            noise = torch.randint(256, (size,), dtype=torch.uint8).numpy().tobytes()
            path = Path(folder, f"{number}.safetensors")
            write_shard(path, shard, payload=noise)
            header = read_header(str(path))
            raw = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
            for tensor in header.tensors:
                entries.append(PlannedTensor(header, tensor, Route.READ, ""))
                expected[tensor.name] = raw[tensor.begin : tensor.end]
        for _ in range(rounds):
            kept = {}
            for name, tensor in read_tensors(entries, device):
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
    print(f"{rounds} rounds of {len(expected)} tensors: {wrong} wrong")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
