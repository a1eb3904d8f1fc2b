"""The demo is the first thing that somebody sees: words, not commands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("target", ["setup", "demo", "$(STAMP)", "$(VLLM_CPU_STAMP)"])
def test_recipe_does_not_show_its_commands(target: str) -> None:
    """Red when `make demo`, or what it makes first, prints raw commands."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", "")
    recipe = re.search(rf"^{re.escape(target)}:.*\n((?:\t.*\n)+)", text, re.MULTILINE)
    assert recipe is not None
    loud = [line for line in recipe[1].splitlines() if not line.startswith("\t@")]
    assert loud == []
