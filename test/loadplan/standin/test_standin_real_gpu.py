"""Tests on the real GPU: what cannot be pretended there is skipped, not failed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from loadplan.standin.gpu import fake_gpu
from loadplan.standin.real_gpu import CannotPretend

TESTS = Path(__file__).parents[2]


def test_machine_that_is_not_there_cannot_be_pretended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Red when a test of another machine runs on this one, or names not its wish."""
    monkeypatch.setenv("LOADPLAN_TEST_GPU", "real")
    with pytest.raises(CannotPretend, match="free_memory cannot be made 5"):
        with fake_gpu(free_memory=5):
            raise AssertionError("entered")


def test_such_a_test_is_skipped_with_its_reason(tmp_path: Path) -> None:
    """Also in a TestCase; red when it fails, passes, or another error is skipped."""
    file = tmp_path / "test_pretended.py"
    file.write_text(
        textwrap.dedent("""
        import unittest
        from loadplan.standin.gpu import fake_gpu

        def test_function():
            with fake_gpu(free_memory=5):
                raise AssertionError

        class TestPretended(unittest.TestCase):
            def test_method(self):
                with fake_gpu(version="0.1.9"):
                    raise AssertionError

        def test_that_fails():
            raise RuntimeError("no GPU, no excuse")
        """)
    )
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "conftest", file],
        cwd=tmp_path,
        env=os.environ
        | {
            "LOADPLAN_TEST_GPU": "real",
            "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, sys.path)]),
        },
        capture_output=True,
        text=True,
    )
    assert "1 failed, 2 skipped" in result.stdout, result.stdout + result.stderr
    assert "free_memory cannot be made 5" in result.stdout
    assert "version cannot be made '0.1.9'" in result.stdout
