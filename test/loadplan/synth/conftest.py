"""A small checkpoint that many tests read."""

from __future__ import annotations

from pathlib import Path

import pytest
from synthetic import SMALL

from loadplan.synth import writer


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("small") / "checkpoint"
    writer.synthesize(out, SMALL)
    return out
