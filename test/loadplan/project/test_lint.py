"""The linters without pre-commit say what they say with it."""

from __future__ import annotations

from pathlib import Path

import lint

HOOK = {
    "id": "x",
    "name": "ruff check",
    "entry": "ruff check --quiet",
    "files": r"^test_.*\.py$",
    "types": ["python"],
    "additional_dependencies": ["ruff==0.15.0"],
}


def test_complaint_is_the_tools_and_only_of_its_files(monkeypatch, tmp_path: Path):
    """Red when a linter's exit code is lost, or it is given other files."""
    monkeypatch.setattr(lint, "ROOT", tmp_path)
    (tmp_path / "test_bad.py").write_text("import os\n")
    (tmp_path / "test_good.py").write_text("A = 1\n")
    (tmp_path / "other.py").write_text("import sys\n")
    files = ["test_bad.py", "test_good.py", "other.py"]
    said = lint.complaint(HOOK, files)
    assert "F401" in said and "`os`" in said and "`sys`" not in said
    assert lint.complaint(HOOK, files[1:]) == ""


def test_only_the_pinned_version_is_taken() -> None:
    """Red when make check passes by a formatter that CI does not use."""
    assert lint.is_here(HOOK)
    assert not lint.is_here(HOOK | {"additional_dependencies": ["ruff==0.14.0"]})
    assert not lint.is_here(HOOK | {"additional_dependencies": ["nothing-here==1"]})
