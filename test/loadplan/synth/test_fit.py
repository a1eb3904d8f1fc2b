"""The model that comes nearest to a size."""

from __future__ import annotations

import pytest
from synthetic import MIB, tensors_of

from loadplan.core.header import LoadPlanError
from loadplan.synth.fit import draw_primes
from loadplan.synth.layout import layout
from loadplan.synth.options import SynthOptions

GIB = 1 << 30


@pytest.mark.parametrize("fraction", [0.2, 0.6])
@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    "size", [16 * MIB, 64 * MIB, 200 * MIB, GIB, 12 * GIB, 100 * GIB]
)
def test_size_and_fraction_are_met(size: int, fraction: float, draft: bool) -> None:
    """Red if a size class or a share drifts by more than the promised 15 %."""
    options = SynthOptions(size=size, engram_fraction=fraction, draft=draft)
    tensors = tensors_of(options).values()
    total = sum(tensor.nbytes for tensor in tensors)
    tables = sum(t.nbytes for t in tensors if ".engram.embed." in t.name)
    assert abs(total - size) <= 0.15 * size
    assert abs(tables - fraction * size) <= 0.05 * size


def test_primes_give_the_published_tables_rows() -> None:
    """Red if primes are skipped, repeated, or not shared by the two layers."""
    primes = draw_primes(16_000_000, 48)
    assert sum(primes[:24]) == 384_006_168
    assert sum(primes[24:]) == 384_016_682


def test_size_that_cannot_be_met_says_what_would_be_made() -> None:
    """Red if a checkpoint far from the wanted size is made without a word."""
    options = SynthOptions(size=8 * MIB, engram_fraction=0.9)
    with pytest.raises(LoadPlanError, match="the nearest model has 1[0-9]{7} bytes"):
        layout(options)
