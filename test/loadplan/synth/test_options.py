"""Options of a synthetic checkpoint, given and read back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from synthetic import MIB, SMALL

from loadplan.core.header import LoadPlanError
from loadplan.synth.options import OPTIONS_NAME, SynthOptions, read_options


def test_options_are_read_back_and_a_foreign_folder_has_none(
    small: Path, tmp_path: Path
) -> None:
    """Red if an option is not written down, or a folder without any raises."""
    assert read_options(small) == SMALL
    assert read_options(tmp_path) is None


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"format": 2, "options": {}}', '{"format": 1, "options": {"a": 1}}'],
)
def test_unreadable_options_are_refused(tmp_path: Path, text: str) -> None:
    """Red if options of another version are taken for this one's."""
    (tmp_path / OPTIONS_NAME).write_text(text)
    with pytest.raises(LoadPlanError, match="loadplan-synth.json: got .*format 1"):
        read_options(tmp_path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"size": 8 * MIB - 1}, "size: got 8388607, expected at least 8388608 bytes"),
        ({"engram_fraction": 0.0}, "engram_fraction: got 0.0, expected 0.05 to 0.9"),
        ({"engram_fraction": float("nan")}, "engram_fraction: got nan"),
        ({"seed": -1}, "seed: got -1, expected 0 to"),
        ({"shards": 2}, "shards: got 2, expected at least 3 files"),
        ({"shards": 0, "mixed_engram": True}, "shards: got 0, expected at least 1"),
    ],
)
def test_value_out_of_range_is_refused(values: dict[str, object], message: str) -> None:
    """Red if a bad value is taken, or its error names neither field nor rule."""
    with pytest.raises(LoadPlanError, match=re.escape(message)):
        SynthOptions(**values)
