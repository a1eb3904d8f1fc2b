"""GPTQ by the real llmcompressor, and what is made of what it returns."""

from __future__ import annotations

from pathlib import Path

import drafter_heads
import pytest
import torch

from loadplan.core.header import LoadPlanError
from loadplan.drafter import figures, gptq, packing
from loadplan.drafter.scheme import Scheme

WIDTH = 64
needs_llmcompressor = pytest.mark.skipif(
    bool(drafter_heads.why_no_llmcompressor()),
    reason=drafter_heads.why_no_llmcompressor(),
)


def trained_like(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """A head and hidden states of which few directions carry most, as in a model."""
    generator = torch.Generator().manual_seed(seed)
    rotation = torch.linalg.qr(torch.randn(WIDTH, WIDTH, generator=generator))[0]
    spectrum = torch.arange(1, WIDTH + 1) ** -1.0
    states = torch.randn(1200, WIDTH, generator=generator) * spectrum @ rotation * 8
    head = torch.randn(96, WIDTH, generator=generator) * 0.5
    return head.to(torch.bfloat16), states.to(torch.bfloat16)


@needs_llmcompressor
def test_gptq_beats_rounding_on_rows_it_has_not_seen(tmp_path: Path) -> None:
    """Red when rows, Hessian or scales reach llmcompressor in another form."""
    scheme = Scheme("int4", 32, False)
    head, states = trained_like()
    scales = packing.find_scales(head, scheme)
    hessian = gptq.hessian(iter(states[:1000].split(300)), WIDTH)
    done: list[int] = []
    moved = gptq.quantize(
        head,
        hessian,
        scales,
        scheme,
        folder=tmp_path / "job",
        progress=done.append,
    )
    assert done == [96]
    assert not list(tmp_path.iterdir())
    rounded = packing.pack(head, scales, scheme, dtype=head.dtype)
    packed = packing.pack(moved, scales, scheme, dtype=head.dtype)
    # What GPTQ put onto the grid is packed as it is.
    assert torch.allclose(packing.unpack(packed, scheme), moved, rtol=1e-6, atol=1e-7)
    found = figures.compare(
        [states[1000:]],
        head,
        {
            "rtn": packing.unpack(rounded, scheme),
            "gptq": packing.unpack(packed, scheme),
        },
    )
    assert found["gptq"].kl < 0.5 * found["rtn"].kl
    figures.check(found)


@needs_llmcompressor
def test_llmcompressor_still_returns_zeros_for_a_zero_hessian(tmp_path: Path) -> None:
    """Red when llmcompressor flags it, so that our own check could go."""
    head, _ = trained_like()
    scheme = Scheme("int4", 32, True)
    scales = packing.find_scales(head, scheme)
    zero = torch.zeros(WIDTH, WIDTH)
    moved = gptq.quantize(head, zero, scales, scheme, folder=tmp_path / "job")
    assert not moved.any()
    with pytest.raises(LoadPlanError, match="all zeros"):
        figures.check_weight("gptq", head, moved)


def test_a_hessian_is_twice_the_mean_of_the_outer_products() -> None:
    """Red when the scale or the sum over blocks changes."""
    states = torch.randn(50, 8, generator=torch.Generator().manual_seed(0))
    done: list[int] = []
    found = gptq.hessian(iter(states.split(7)), 8, progress=done.append)
    assert done == [7] * 7 + [1]
    expected = 2 * (states.T @ states) / 50
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_dead_inputs_are_an_error_before_gptq() -> None:
    """Red when rows that give nothing to calibrate by are calibrated on."""
    states = torch.randn(50, 8)
    states[:, 3] = 0
    with pytest.raises(LoadPlanError, match="1 of 8 inputs of the head are zero"):
        gptq.hessian(iter([states]), 8)
    with pytest.raises(LoadPlanError, match="8 of 8"):
        gptq.hessian(iter([]), 8)


def test_no_llmcompressor_tells_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Red when a missing environment ends in a traceback."""
    monkeypatch.delenv(gptq.PYTHON_VARIABLE, raising=False)
    monkeypatch.setattr(gptq, "_SETUP", tmp_path / "python")
    with pytest.raises(LoadPlanError, match="make setup"):
        gptq.find_python()
    monkeypatch.setenv(gptq.PYTHON_VARIABLE, str(tmp_path / "other"))
    with pytest.raises(LoadPlanError, match="no program"):
        gptq.find_python()


def worker(tmp_path: Path, body: str) -> Path:
    """A stand-in for the environment's Python."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_a_worker_that_fails_is_told_with_its_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Red when the reason is lost, or what was exchanged stays behind."""
    python = worker(tmp_path, "echo no memory left >&2; exit 3")
    monkeypatch.setenv(gptq.PYTHON_VARIABLE, str(python))
    head, _ = trained_like()
    scheme = Scheme("int4", 32, True)
    with pytest.raises(LoadPlanError, match="ended with 3.*no memory left"):
        gptq.quantize(
            head,
            torch.eye(WIDTH),
            packing.find_scales(head, scheme),
            scheme,
            folder=tmp_path / "job",
        )
    assert not (tmp_path / "job").exists()
