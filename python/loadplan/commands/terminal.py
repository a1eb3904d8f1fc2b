"""Where words go: to a terminal, a file, or a pipe whose reader has gone."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console

# What a shell reports for a command that a closed pipe has ended.
CLOSED_PIPE = 141

# ECMA-48: control sequences (colours), and operating system commands (titles).
_SEQUENCE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")


def console(**options: Any) -> Console:
    """Where results go: words as they are, no colour where that is no terminal.

    A closed pipe is BrokenPipeError, for the one place that ends the command.
    """
    from rich.console import Console

    class Results(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError

    return Results(highlight=False, markup=False, emoji=False, **options)


def has_closed_pipe() -> bool:
    """Whether stdout is a pipe whose reader has gone."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), select.POLLOUT)
        return any(event & select.POLLERR for _, event in poll.poll(0))
    except (AttributeError, OSError, ValueError):
        return False  # no stdout, or one that is no file


def leave_closed_pipe() -> int:
    """Let nothing more go to stdout, whose reader has gone, and return the exit code.

    Python would write what is left at its end, fail and say so.
    """
    with contextlib.suppress(OSError, ValueError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    return CLOSED_PIPE


@contextlib.contextmanager
def engine_output() -> Iterator[None]:
    """What an engine prints and logs goes to stderr, plain where that is no terminal.

    stdout is for results: an engine's words would stand among them, and in the JSON.
    """
    with contextlib.ExitStack() as stack:
        if not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(_Plain(sys.stderr)))
        stack.enter_context(contextlib.redirect_stdout(sys.stderr))
        yield


class _Plain:
    """A text stream that takes away what only a terminal would obey."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        self._stream.write(_SEQUENCE.sub("", text))
        return len(text)

    def writelines(self, lines: Iterator[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
