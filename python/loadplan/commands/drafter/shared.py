"""What several steps share: arguments, errors of missing libraries, a bar of rows."""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loadplan.commands import numbers

if TYPE_CHECKING:
    from loadplan.drafter import quantize as quantizing

# Rows, ids and tokens: beyond it a typing error is more likely.
MOST = 1 << 32


def with_libraries(
    run: Callable[[argparse.Namespace], int],
) -> Callable[[argparse.Namespace], int]:
    """Tell which library a step lacks: those of this command are no requirements."""

    def checked(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except ModuleNotFoundError as error:
            from loadplan.core.header import LoadPlanError

            name = (error.name or "a library").partition(".")[0].replace("_", "-")
            raise LoadPlanError(
                f"{name} is not installed here, expected it for this step; install it "
                "beside loadplan, as requirements.txt pins it"
            ) from error

    return checked


def add_tokenizer(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR",
        help="a folder with the tokenizer (default: the checkpoint's)",
    )


def add_held_out_rows(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--held-out-rows",
        type=numbers.whole(1, MOST),
        metavar="N",
        help="the capture's last rows, kept for measuring (default: a fifth)",
    )


def add_head_name(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--head-name",
        metavar="NAME",
        help="the module of the output head (default: found in the index)",
    )


def say(arguments: argparse.Namespace, about: dict[str, Any], text: str) -> None:
    print(json.dumps(about, indent=2) if arguments.json else text)


@contextlib.contextmanager
def rows_bar() -> Iterator[quantizing.StartProgress]:
    """Bars of rows with rows/s on stderr, silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    class Speed(ProgressColumn):
        def render(self, task: Any) -> str:
            speed = task.finished_speed or task.speed
            return "? rows/s" if speed is None else f"{speed:,.0f} rows/s"

    console = Console(stderr=True)
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        Speed(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:

        def start(step: str, total: int) -> Callable[[int], None]:
            task = progress.add_task(step, total=total)
            return lambda rows: progress.advance(task, rows)

        yield start
