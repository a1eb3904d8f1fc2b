"""GPTQ of a head by llmcompressor, which lives in an environment of its own.

llmcompressor pins torch below what the engines bring, so it is called as a program,
see :mod:`gptq_worker`. It raises no flag when the Hessian is zero or has dead inputs
and returns zeros for them: what comes back is checked here.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import files, safetensors_file
from loadplan.drafter.packing import Scales
from loadplan.drafter.scheme import Scheme

PYTHON_VARIABLE = "LOADPLAN_LLMCOMPRESSOR_PYTHON"
"""Names the Python that has llmcompressor, where that is not the set-up's."""

_WORKER = Path(__file__).with_name("gptq_worker.py")
_SETUP = Path(__file__).parents[3] / ".venv-llmcompressor" / "bin" / "python"


def find_python() -> Path:
    """The Python that can import llmcompressor.

    Raises:
        LoadPlanError: there is none.
    """
    named = os.environ.get(PYTHON_VARIABLE)
    if named:
        if not os.access(named, os.X_OK):
            raise LoadPlanError(
                f"{PYTHON_VARIABLE}={named}: no program, expected the Python of an "
                "environment with llmcompressor"
            )
        return Path(named)
    if importlib.util.find_spec("llmcompressor") is not None:
        return Path(sys.executable)
    if not os.access(_SETUP, os.X_OK):
        raise LoadPlanError(
            "no llmcompressor here, expected an environment with it for GPTQ; run "
            "'make setup' in a checkout of loadplan, or install "
            "requirements-llmcompressor.txt into one and name its Python in "
            f"{PYTHON_VARIABLE}"
        )
    return _SETUP


def hessian(
    blocks: Iterator[torch.Tensor],
    width: int,
    *,
    progress: files.Progress = files.no_progress,
) -> torch.Tensor:
    """2/n times the sum of x x^T over the rows x, FP32 ``[width, width]``.

    Raises:
        LoadPlanError: no rows, or an input that is zero in all of them.
    """
    total = torch.zeros(width, width, dtype=torch.float64)
    count = 0
    for block in blocks:
        rows = block.float()
        # In FP32 a sum over millions of rows would lose the late ones.
        total += (rows.T @ rows).double()
        count += rows.shape[0]
        progress(rows.shape[0])
    dead = int((total.diagonal() == 0).sum()) if count else width
    if dead:
        raise LoadPlanError(
            f"{dead} of {width} inputs of the head are zero in all {count} rows, "
            "expected none: GPTQ would write zeros for them; capture other text or "
            "more rows"
        )
    return (total * (2 / count)).float()


def quantize(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scales: Scales,
    scheme: Scheme,
    *,
    folder: Path,
    progress: files.Progress = files.no_progress,
) -> torch.Tensor:
    """The weight moved onto the grid of ``scales``: FP32 ``[rows, width]``.

    ``folder`` is made for what the two processes exchange, and removed.

    Raises:
        LoadPlanError: llmcompressor failed or fell back to rounding.
    """
    python = find_python()
    given = {
        "weight": weight.float(),
        "hessian": hessian,
        "scale": scales.scale,
        "zero_point": scales.zero_point,
    }
    if scales.global_scale is not None:
        given["global_scale"] = scales.global_scale
    files.fresh_folder(folder)
    try:
        pieces = [safetensors_file.tensor_piece(*item) for item in given.items()]
        safetensors_file.write(folder / "in.safetensors", pieces, metadata={})
        files.write_json(folder / "job.json", {"weights": scheme.weights()})
        _run(python, folder, progress)
        out, _ = safetensors_file.read_all(folder / "out.safetensors")
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if out["fallback"].any():
        raise LoadPlanError(
            "GPTQ could not factorise the Hessian and rounded instead, expected it to "
            "work; capture more rows, at least several times the head's width"
        )
    return out["weight"]


def _run(python: Path, folder: Path, progress: files.Progress) -> None:
    # Isolated: a PYTHONPATH of this process belongs to another environment.
    command = [python, "-I", _WORKER, folder]
    log = folder / "worker.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as worker,
    ):
        assert worker.stdout is not None
        try:
            for line in worker.stdout:
                # Libraries print there too.
                if line.strip().isdecimal():
                    progress(int(line))
        except BaseException:
            worker.kill()
            raise
    if worker.returncode != 0:
        said = log.read_text(errors="replace").strip().splitlines()[-5:]
        raise LoadPlanError(
            f"llmcompressor ended with {worker.returncode}, expected 0; the end of "
            f"what it said: {' | '.join(said)}"
        )
