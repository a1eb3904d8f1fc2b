"""Which release lies where."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_tree import TARGET, make_tree

from loadplan.engines import targets
from loadplan.errors import EngineError


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "site-packages")


def test_other_release_is_refused_with_the_known_one(root: Path) -> None:
    """Red when an unpinned version is patched."""
    targets.check_version(TARGET, root)
    (root / f"sglang-{TARGET.version}.dist-info").rename(root / "sglang-0.9.dist-info")
    with pytest.raises(EngineError, match=r"sglang 0\.9, expected one of \[0\.5\.23"):
        targets.check_version(TARGET, root)


def test_root_is_found_in_a_wheel_and_in_a_checkout(root: Path, tmp_path: Path) -> None:
    """Red when a source checkout's python/ folder is not looked into."""
    assert targets.find_root(TARGET, root) == root
    (tmp_path / "checkout").mkdir()
    root.rename(tmp_path / "checkout" / "python")
    root = targets.find_root(TARGET, tmp_path / "checkout")
    assert root == tmp_path / "checkout" / "python"
    with pytest.raises(EngineError, match="no package 'sglang' here"):
        targets.find_root(TARGET, tmp_path)
