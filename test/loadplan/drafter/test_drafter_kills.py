"""A kill in every step, before every call that changes a file."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import drafter_checkpoint as tiny
import drafter_heads
import drafter_variant
import pytest
import torch
from drafter_kills import kill_at
from test_drafter_capture import FakeEngine

from loadplan.drafter import capture, gptq, packing, quantize, vocab


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill does not lose what was written, synced or not: the call is counted."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of each file of a folder."""
    if path.is_file():
        return {"": path.read_bytes()}
    return {p.name: p.read_bytes() for p in sorted(path.iterdir())}


def check_kills(
    step: Callable[[], object],
    out: Path,
    source: Path,
    *,
    every: int = 1,
) -> int:
    """Kill ``step`` before each call, run it again each ``every`` kills; count kills.

    After a kill ``out`` is absent or whole; the next run makes the same bytes and
    leaves nothing else.
    """
    before = tiny.hashes(source)
    step()
    whole = contents(out)
    beside = sorted(os.listdir(out.parent))
    _remove(out)
    for number in itertools.count():
        killed = kill_at(step, number)
        assert tiny.hashes(source) == before
        if out.exists():
            assert contents(out) == whole
            _remove(out)
        if not killed:
            assert number > 5
            return number
        if number % every == 0:
            step()
            assert contents(out) == whole
            assert sorted(os.listdir(out.parent)) == beside
            _remove(out)
    raise AssertionError("unreachable")


def _remove(out: Path) -> None:
    shutil.rmtree(out) if out.is_dir() else out.unlink()


def test_capture(
    tmp_path: Path,
    text: Path,
    layout: str,
    source: Path,
) -> None:
    """Red when a killed capture leaves half a folder, or the next one differs."""
    asked = capture.Options(
        model=source, text=text, rows=50, length=16, shard_rows=16, batch=2
    )

    def step() -> None:
        capture.capture(
            asked, tmp_path / "rows", open_engine=lambda _: FakeEngine(), version="1"
        )

    check_kills(step, tmp_path / "rows", source, every=5)


def test_vocab(tmp_path: Path, layout: str, source: Path) -> None:
    """Red when killed ids are half a file."""
    kept = vocab.choose([3, 2, 1], [1, 1, 1], always=set(), number=2)
    out = tmp_path / "ids.st"

    def step() -> None:
        vocab.write(out, kept, vocabulary=3, tokenizer=source)

    check_kills(step, out, source)


@pytest.fixture
def rows_of_noise(tmp_path: Path, text: Path, source: Path) -> Path:
    """A capture of a source, of noise: enough for a Hessian."""

    class Noise(FakeEngine):
        def states(self, batch):
            generator = torch.Generator().manual_seed(len(self.asked))
            self.asked += batch
            return [torch.randn(len(s), tiny.WIDTH, generator=generator) for s in batch]

    asked = capture.Options(model=source, text=text, rows=300, length=100)
    out = tmp_path / "rows"
    capture.capture(asked, out, open_engine=lambda _: Noise(), version="1")
    return out


def test_quantize(
    tmp_path: Path,
    layout: str,
    source: Path,
    rows_of_noise: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a killed head is half a file, or what GPTQ was given stays."""
    asked = quantize.Options(source=source, capture=rows_of_noise)
    out = tmp_path / "head.st"

    # llmcompressor in a process of its own would take seconds for each kill.
    def stand_in(python: Path, folder: Path, progress: object) -> None:
        given, _ = quantize.safetensors_file.read_all(folder / "in.safetensors")
        scales = packing.Scales(given["scale"], given["zero_point"], None)
        weight = given["weight"]
        packed = packing.pack(weight, scales, tiny.OWN_SCHEME, dtype=weight.dtype)
        moved = {
            "weight": packing.unpack(packed, tiny.OWN_SCHEME),
            "fallback": torch.zeros(1, dtype=torch.uint8),
        }
        pieces = [quantize.safetensors_file.tensor_piece(*i) for i in moved.items()]
        quantize.safetensors_file.write(folder / "out.safetensors", pieces, metadata={})

    monkeypatch.setattr(gptq, "_run", stand_in)
    monkeypatch.setattr(gptq, "find_python", lambda: Path("python"))
    check_kills(lambda: quantize.quantize(asked, out), out, source, every=5)


def test_variant(
    tmp_path: Path,
    layout: str,
    source: Path,
    heads: drafter_heads.Heads,
) -> None:
    """Red when a killed build leaves a variant that is not whole, or harms SRC."""
    out = tmp_path / "fast"
    check_kills(
        lambda: drafter_variant.make(source, out, heads),
        out,
        source,
        every=30,
    )
