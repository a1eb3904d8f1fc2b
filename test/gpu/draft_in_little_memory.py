"""A draft loads while 5 % of the device memory is free, through the patched SGLang.

    python test/gpu/draft_in_little_memory.py CHECKPOINT [--free 0.05]

CHECKPOINT is one of ``loadplan synth``; its draft are the tensors below ``mtp.``. The
patched engine must be importable. Every byte of the draft is compared with official
safetensors. Exit 0: all right; 1: a byte differs or a tensor is missing; 2: no GPU.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "python"))

from loadplan.load.engine import open_engine  # noqa: E402

MIB = 1 << 20


class Draft(torch.nn.Module):
    """A draft that keeps what the checkpoint's format calls a draft's."""

    def wanted_weight(self, name: str) -> bool:
        return name.startswith("mtp.")


def official(checkpoint: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names = [name for name in file.keys() if name.startswith("mtp.")]
            found |= {name: file.get_tensor(name) for name in names}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--free", type=float, default=0.05, help="share of the memory")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU here")
        return 2
    expected = official(arguments.checkpoint)
    with open_engine(
        "sglang", arguments.checkpoint, engram_config='{"placement": "cpu"}'
    ):
        from sglang.srt.configs.load_config import LoadConfig
        from sglang.srt.model_loader.loader import DefaultModelLoader

        free, total = torch.cuda.mem_get_info()
        taken = int(free - arguments.free * total)
        target = torch.empty(taken, dtype=torch.uint8, device="cuda")
        before, _ = torch.cuda.mem_get_info()
        loader = DefaultModelLoader(LoadConfig(load_format="instanttensor"))
        config = SimpleNamespace(
            model_path=str(arguments.checkpoint),
            revision=None,
            hf_config=SimpleNamespace(architectures=["Draft"]),
        )
        least, wrong, seen = before, 0, set()
        for name, tensor in loader._get_all_weights(config, Draft()):
            least = min(least, torch.cuda.mem_get_info()[0])
            want = expected[name]
            same = tensor.shape == want.shape and tensor.dtype == want.dtype
            bits = tensor.cpu().reshape(-1).view(torch.uint8)
            wrong += not (same and bits.equal(want.reshape(-1).view(torch.uint8)))
            seen.add(name)
    nbytes = sum(tensor.nbytes for tensor in expected.values())
    missing = len(expected.keys() - seen)
    print(
        f"{target.nbytes // MIB} MiB taken, {before // MIB} MiB free; a draft of "
        f"{len(expected)} tensors, {nbytes // MIB} MiB, took at most "
        f"{(before - least) // MIB} MiB at once: {wrong} wrong, {missing} missing"
    )
    return int(wrong > 0 or missing > 0)


if __name__ == "__main__":
    sys.exit(main())
