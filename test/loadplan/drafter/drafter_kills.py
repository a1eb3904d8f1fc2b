"""End a step at each of its calls that changes a file, by a fork.

Each call to be watched is looked up in ``os`` when it is made.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable

_CALLS = (
    "open",
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

    def watched(function: Callable) -> Callable:
        def call(*arguments, **options):
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **options)

        return call

    for name in _CALLS:
        setattr(os, name, watched(getattr(os, name)))
