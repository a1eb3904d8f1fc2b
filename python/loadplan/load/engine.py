"""A patched engine as a load sees it, and how it is opened."""

from __future__ import annotations

import contextlib
import importlib
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import torch

from loadplan.core.header import LoadPlanError
from loadplan.core.plan import LoadPlan


class Engine(Protocol):
    """A patched engine, open for one load on a single rank."""

    name: str

    def tables(self) -> str:
        """Where the Engram tables live, as the server logs it."""

    def plan(self) -> LoadPlan:
        """The plan that the engine's glue makes, without running it."""

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The engine's own iterator over the checkpoint."""

    def default_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The same of its default load format."""

    def take(self, name: str, tensor: torch.Tensor) -> bool:
        """Load ``tensor`` into a table, if it is one; the engine's loader does it."""

    def finish(self) -> dict[str, torch.Tensor]:
        """End the load as the engine does; the tables by checkpoint name."""


# By name, the module here: its open_engine is a context that yields an Engine.
ENGINES = {"sglang": "sglang", "tokenspeed": "tokenspeed"}


@contextlib.contextmanager
def open_engine(
    name: str, checkpoint: Path, *, engram_config: str | None
) -> Iterator[Engine]:
    """The patched engine called ``name`` from ``sys.path``.

    Raises:
        LoadPlanError: its loader cannot be run here.
    """
    if name not in ENGINES:
        raise LoadPlanError(
            f"'loadplan load' cannot run {name!r}, expected one of {sorted(ENGINES)}"
        )
    with warnings.catch_warnings():
        # Modules that are imported along the way tell what they miss for serving.
        warnings.simplefilter("ignore", UserWarning)
        module = importlib.import_module(f"loadplan.load.{ENGINES[name]}")
        with module.open_engine(checkpoint, engram_config=engram_config) as engine:
            yield engine


def check_checkpoint(checkpoint: Path) -> None:
    """Refuse early what no loader can open.

    Raises:
        LoadPlanError: not a folder, or no config.json in it that can be read.
    """
    config = checkpoint / "config.json"
    if not config.is_file():
        raise LoadPlanError(
            f"{checkpoint}: no config.json, expected a folder with a checkpoint; "
            "'loadplan synth DIR' makes one"
        )
    try:
        json.loads(config.read_bytes())
    except ValueError as error:
        raise LoadPlanError(
            f"{config}: not JSON ({error}), expected a model's configuration; "
            "download the file again"
        ) from error
