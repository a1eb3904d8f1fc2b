"""Memory at its highest."""

from __future__ import annotations

import threading
from pathlib import Path

import torch

from loadplan.load.peaks import Watch

MIB = 1 << 20


def test_watch_sees_a_peak_that_is_over(tmp_path: Path) -> None:
    """Red when only the end counts, or memory for hashing counts as the load's."""
    with Watch() as watch:
        memory = torch.ones(64 * MIB, dtype=torch.uint8)
        threading.Event().wait(0.2)
        del memory
    assert 60 * MIB < watch.peaks().host < 96 * MIB
    assert watch.peaks().device is None or watch.peaks().device >= 0
    held = torch.ones(64 * MIB, dtype=torch.uint8)
    with Watch(besides=lambda: 0 if held is None else held.nbytes) as watch:
        pass
    assert watch.peaks().host < 16 * MIB
