"""What several commands share: arguments, sizes, where an engine lies."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import numbers
from loadplan.engines import targets

if TYPE_CHECKING:
    from rich.progress import Progress

DEFAULT_ENGRAM = '{"placement": "cpu"}'


def add_command(
    commands: Any, name: str, *, summary: str, text: str, example: str
) -> argparse.ArgumentParser:
    """Add a command whose help ends with an example, one command a line."""
    shown = "\n".join(f"  {line}" for line in example.splitlines())
    return commands.add_parser(
        name,
        help=summary,
        description=f"{text}\n\nExample:\n{shown}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def add_json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="for machines")


def add_engine(command: argparse.ArgumentParser) -> None:
    command.add_argument("engine", help=f"one of {sorted(targets.load_targets())}")


def add_target(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--target",
        type=Path,
        metavar="DIR",
        help="an unpacked wheel, a site-packages folder or a source checkout "
        "(default: the engine of this Python's environment)",
    )


def add_engram_config(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--engram-config",
        default=DEFAULT_ENGRAM,
        metavar="JSON",
        help=f"as for the server (default: {DEFAULT_ENGRAM})",
    )


def add_machine(command: argparse.ArgumentParser) -> None:
    """What a checkpoint is loaded on, and which parts of it."""
    command.add_argument(
        "--tp",
        type=numbers.whole(1, numbers.MOST_GPUS),
        default=1,
        metavar="N",
        help="GPUs that share the model (default: 1)",
    )
    command.add_argument(
        "--nodes",
        type=numbers.whole(1, numbers.MOST_GPUS),
        default=1,
        metavar="N",
        help="hosts that these GPUs are in (default: 1)",
    )
    add_engram_config(command)
    command.add_argument(
        "--draft",
        choices=("dspark", "mtp"),
        help="load the checkpoint's own draft too",
    )


def shown(text: str) -> str:
    """``text`` of a file we did not write, without what a terminal would obey."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


@contextlib.contextmanager
def writing(option: str, path: Path, way_out: str) -> Iterator[None]:
    """Name the option behind ``path`` where writing there fails.

    Raises:
        LoadPlanError: an OSError, with the option and what to do.
    """
    try:
        yield
    except OSError as error:
        from loadplan.core.header import LoadPlanError

        raise LoadPlanError(
            f"{option}: {path}: cannot be written ({error.strerror or error}); "
            f"{way_out}"
        ) from error


def locate(engine: str, folder: Path | None) -> tuple[targets.Target, Path]:
    """The engine and its folder: in ``folder``, else in this Python's environment."""
    target = targets.find_target(engine)
    if folder is not None:
        return target, targets.find_root(target, folder)
    root = targets.environment_root(target)
    imported = targets.importable_root(target)
    if imported is not None and imported.resolve() != root.resolve():
        print(
            f"NOTE {target.name} is installed in {root}, but from here Python "
            f"would import {imported}",
            file=sys.stderr,
        )
    return target, root


def progress_bar() -> Progress:
    """A bar of bytes on stderr, silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
