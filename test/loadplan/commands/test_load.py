"""What ``loadplan load`` shows of a report, and where the engine's noise goes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from loadplan.commands import load
from loadplan.load.peaks import Peaks
from loadplan.load.report import DefaultReport, LoadReport, RouteReport

ROOT = Path(__file__).parents[3]
MIB = 1 << 20


def shown(*, device: int | None, compare: bool) -> str:
    """The text of a report with ``device`` bytes at the peak of the GPU's memory."""
    peaks = Peaks(host=3 * MIB, page_cache=5 * MIB, pinned=0, device=device)
    default = DefaultReport(seconds=4.0, peaks=peaks, same=True, loadplan_seconds=2.0)
    report = LoadReport(
        engine="sglang",
        reader="",
        routes={
            route: RouteReport(files=1, tensors=1, nbytes=MIB, seconds=1.0)
            for route in ("skip", "host", "read", "stream")
        },
        stock_device_bytes=3 * MIB,
        table_bytes=MIB,
        loading_seconds=1.0,
        seconds=2.0,
        peaks=peaks,
        default=default if compare else None,
        digest="abc",
        reference="the seed",
        wrong=(),
    )
    output = io.StringIO()
    load._print_report(Console(file=output, width=100), report)
    return output.getvalue()


def test_peaks_of_both_loaders_stand_side_by_side() -> None:
    """Red when a comparison shows the memory of one loader alone."""
    text = shown(device=7 * MIB, compare=True)
    rows = [line.split() for line in text.splitlines() if line.count("7.00 MiB") == 1]
    assert [row[1] for row in rows] == ["loadplan", "default"]
    assert "2.0 times as long" in " ".join(text.split())
    assert "The default loader brought the same bytes." in text


@pytest.mark.parametrize("compare", [False, True])
def test_memory_of_a_stub_is_not_shown(compare: bool) -> None:
    """The stub's GPU is host memory; red when its figures look like a result."""
    text = shown(device=None, compare=compare)
    assert "Peak memory" not in text
    assert "times as long" not in text
    assert "Without a GPU times and memory mean nothing" in text
    assert ("brought the same bytes" in text) == compare


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "loadplan", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT / "python")},
        capture_output=True,
        text=True,
    )


def test_noise_of_the_engine_is_in_the_log_that_is_named(tmp_path: Path) -> None:
    """Red when an import writes between our lines, or the log is not named."""
    checkpoint, log = tmp_path / "v41", tmp_path / "engine.log"
    assert run("synth", checkpoint, "--size", "8M").returncode == 0
    tree = ROOT / "build" / "engines" / "sglang" / "patched"
    result = run("load", checkpoint, "--engine-dir", tree, "--log", log)
    assert result.returncode == 0, result.stderr
    assert result.stderr == f"What sglang printed: {log}\n"
    assert "The digest matches" in result.stdout
    assert "Cannot detect CUDA" not in result.stdout
    # SGLang says so where there is no GPU.
    assert torch.cuda.is_available() or "Cannot detect CUDA" in log.read_text()
