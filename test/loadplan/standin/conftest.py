"""Files that the stub of InstantTensor is tried with."""

from __future__ import annotations

from pathlib import Path

import odd_files
import pytest


@pytest.fixture
def good(tmp_path: Path) -> list[str]:
    """Paths of two plain files, not in sorted order: tensor c, then a and b."""
    case = odd_files.Case("good", (odd_files.SECOND, odd_files.GOOD))
    return case.write(tmp_path, Path("/dev/shm"))
