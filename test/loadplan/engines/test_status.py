"""What status says of a tree."""

from __future__ import annotations

from pathlib import Path

import pytest
from engine_tree import TARGET, make_tree, snapshot

from loadplan.engines import apply, tree
from loadplan.engines.status import status_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return make_tree(tmp_path / "site-packages")


def test_status_explains_a_killed_run_and_the_next_one_cleans(root: Path) -> None:
    """Red when temporary files of a killed run are not shown, or stay."""
    stock = snapshot(root)
    edits = apply.plan_apply(TARGET, root)
    tree.commit(root, edits[:-5])
    stray = root / TARGET.core_folder / ".loadplan-abc"
    stray.write_text("half")
    status = status_of(TARGET, root)
    assert status.state == "mixed"
    assert "A run was killed" in status.advice
    assert f"{TARGET.core_folder}/.loadplan-abc" in status.leftovers
    apply.revert(TARGET, root)
    assert snapshot(root) == stock
    assert status_of(TARGET, root).leftovers == ()
