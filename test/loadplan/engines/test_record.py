"""A wheel's RECORD lists what apply wrote, and is itself again after revert."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from engine_tree import LOADER, TARGET, make_tree, record_line, snapshot

from loadplan.engines import apply


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "site-packages")


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["wheel", "pip"])
def test_record_lists_what_is_there_and_is_itself_again(
    tmp_path: Path, end: str
) -> None:
    """Red when pip would miss a file or a hash, or RECORD does not come back."""
    root = make_tree(tmp_path / "site-packages", end=end)
    record = root / TARGET.record
    before = record.read_bytes()
    apply.apply(TARGET, root)
    text = record.read_bytes().decode()
    lines = text.split(end)
    present = {p for p in snapshot(root) if p.startswith("sglang/") and "." in p}
    originals = f"{TARGET.core_folder}/originals"
    present |= {f"{originals}/{p.name}" for p in (root / originals).iterdir()}
    for path in present:
        assert lines.count(record_line(root, path)) == 1, path
    assert len(lines) == len(present) + 3
    assert text.count("\n") == text.count(end)
    apply.revert(TARGET, root)
    assert record.read_bytes() == before


def test_record_keeps_lines_that_no_installer_writes(root: Path) -> None:
    """Red when a line that cannot be computed back is rewritten."""
    record = root / TARGET.record
    odd = f"{LOADER},sha512=abc,1\n{LOADER},,\n{LOADER},sha256={'A' * 43},5\nno comma"
    record.write_bytes(record.read_bytes() + odd.encode())
    before = record.read_bytes()
    apply.apply(TARGET, root)
    assert record.read_bytes().endswith(odd.encode())
    apply.revert(TARGET, root)
    assert record.read_bytes() == before


def test_tree_without_record_is_patched_without_one(root: Path) -> None:
    """A checkout; red when RECORD is required or made."""
    shutil.rmtree((root / TARGET.record).parent)
    before = snapshot(root)
    apply.apply(TARGET, root)
    assert not list(root.rglob("RECORD"))
    apply.revert(TARGET, root)
    assert snapshot(root) == before
