"""How long planning takes: 500,000 tensors in 96 files, headers only.

    python benchmark/plan_speed.py [--tensors N] [--files N] [--runs N]

Prints seconds for reading the headers and for making the plan, each run on its own
line. The files are sparse: nothing but headers is ever written or read.
"""

from __future__ import annotations

import argparse
import json
import platform
import struct
import tempfile
import time
from pathlib import Path

from loadplan.core.header import read_headers
from loadplan.core.loading import decide_routes
from loadplan.core.ranks import Machine, file_digests


def write(folder: Path, files: int, tensors: int) -> tuple[list[str], dict[str, str]]:
    """Shards of small expert weights as in a large mixture; paths and index."""
    paths, weight_map, each = [], {}, tensors // files
    for number in range(files):
        path = folder / f"model-{number:05d}.safetensors"
        header = {
            f"model.layers.{number}.mlp.experts.{i}.gate_proj.weight": {
                "dtype": "BF16",
                "shape": [64, 32],
                "data_offsets": [4096 * i, 4096 * (i + 1)],
            }
            for i in range(each)
        }
        text = json.dumps(header).encode()
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + 4096 * each)
        paths.append(str(path))
        weight_map |= dict.fromkeys(header, str(path))
    return paths, weight_map


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tensors", type=int, default=500_000)
    parser.add_argument("--files", type=int, default=96)
    parser.add_argument("--runs", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths, weight_map = write(Path(folder), arguments.files, arguments.tensors)
        print(f"{len(weight_map)} tensors in {len(paths)} files, {platform.machine()}")
        for _ in range(arguments.runs):
            started = time.perf_counter()
            headers = read_headers(paths)
            read = time.perf_counter()
            plan = decide_routes(headers, weight_map, Machine(device_budget=40 << 30))
            planned = time.perf_counter()
            digests = file_digests(plan)
            ended = time.perf_counter()
            print(
                f"headers {read - started:.2f} s, plan {planned - read:.2f} s, "
                f"digests {ended - planned:.2f} s ({len(digests)} files)"
            )


if __name__ == "__main__":
    main()
