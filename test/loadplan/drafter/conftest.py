"""What the drafter's tests share: tiny checkpoints, rows, heads."""

from __future__ import annotations

from pathlib import Path

import drafter_checkpoint as tiny
import drafter_heads
import pytest
import torch

# Some tests fork, and a fork does not get the threads of a torch that has used them.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_text(tmp_path_factory.mktemp("text") / "book.txt")


@pytest.fixture(scope="session")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of each layout; nobody may write to them."""
    folder = tmp_path_factory.mktemp("sources")
    return {name: tiny.write_layout(folder / name, name) for name in tiny.LAYOUTS}


@pytest.fixture(params=tiny.LAYOUTS)
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def source(tmp_path: Path, layout: str) -> Path:
    """A checkpoint of the layout, of the test's own."""
    return tiny.write_layout(tmp_path / "source", layout)


@pytest.fixture(scope="session")
def heads(tmp_path_factory: pytest.TempPathFactory) -> drafter_heads.Heads:
    """Heads for any of the sources, rounded: for tests of what comes after."""
    return drafter_heads.write_heads(tmp_path_factory.mktemp("heads"))
