"""Hunks and patches as the files of a series hold them."""

from __future__ import annotations

import pytest
from engine_tree import TARGET

from loadplan.engines.series import Hunk, apply_hunks, read_series, reverse_hunks
from loadplan.engines.stages import added_files
from loadplan.errors import EngineError


def test_hunk_needs_its_lines_at_exactly_its_place() -> None:
    """No fuzz and no offset; red when a hunk is moved to where it seems to fit."""
    hunk = Hunk(start=2, old=("b\n", "c\n"), new=("b\n", "x\n", "c\n"))
    assert apply_hunks("a\nb\nc\n", (hunk,), label="p") == "a\nb\nx\nc\n"
    for text in ("b\nc\n", "a\na\nb\nc\n", "a\nb\nc"):
        with pytest.raises(EngineError, match="p: line 2 is not"):
            apply_hunks(text, (hunk,), label="p")


def test_reversed_hunks_take_every_change_back() -> None:
    """Two hunks that change the length; red when the second one's line is off."""
    hunks = (
        Hunk(start=1, old=("a\n",), new=("a\n", "1\n", "2\n")),
        Hunk(start=3, old=("c\n", "d\n"), new=("d\n",)),
    )
    text = "a\nb\nc\nd\n"
    patched = apply_hunks(text, hunks, label="p")
    assert patched == "a\n1\n2\nb\nd\n"
    reverse = reverse_hunks(hunks)
    assert apply_hunks(patched, reverse, label="p") == text


def test_every_new_file_is_named_by_one_patch() -> None:
    """Red when export would not know which patch brings a file."""
    series = read_series(TARGET.patches)
    named = [path for patch in series for path in added_files(TARGET, patch)]
    assert sorted(named) == sorted(map(TARGET.upstream, TARGET.new_files()))
