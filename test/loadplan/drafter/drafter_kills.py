"""End a step at each of its calls that changes a file, by a fork.

Each call to be watched is looked up in its module when it is made. A kill right after a
file was opened leaves what a write that is no rename leaves.
"""

from __future__ import annotations

import builtins
import io
import itertools
import os
import signal
from collections.abc import Callable

_CALLS = (
    "fsync",
    "fchmod",
    "replace",
    "rename",
    "link",
    "unlink",
    "mkdir",
    "rmdir",
)


def kill_at(step: Callable[[], object], number: int) -> bool:
    """Whether a child that ran ``step`` was killed before its ``number``-th call."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _watch(number)
            step()
            code = 0
        finally:
            os._exit(code)
    status = os.waitpid(child, 0)[1]
    code = os.waitstatus_to_exitcode(status)
    assert code in (0, -signal.SIGKILL), f"the step failed by itself: {code}"
    return code != 0


def _watch(number: int) -> None:
    calls = itertools.count()

    def count() -> None:
        if next(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)

    def watched(function: Callable) -> Callable:
        def call(*arguments, **options):
            count()
            return function(*arguments, **options)

        return call

    def opening(function: Callable) -> Callable:
        def call(path, mode="r", *arguments, **options):
            opened = function(path, mode, *arguments, **options)
            # Of os.open these are flags.
            if isinstance(mode, int) or set(mode) & set("wax+"):
                count()
            return opened

        return call

    for name in _CALLS:
        setattr(os, name, watched(getattr(os, name)))
    os.open = opening(os.open)
    io.open = opening(io.open)
    builtins.open = opening(builtins.open)
