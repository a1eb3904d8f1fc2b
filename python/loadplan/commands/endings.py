"""How a command is told to end: signals that would kill it become an exception.

Its ``finally`` clauses then clean up, as they do after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


class Ended(BaseException):
    """Told to end by a signal; no error, so that nobody goes on after it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.name = signal.Signals(number).name
        # What a shell reports for a process that the signal has killed.
        self.code = 128 + number


@contextlib.contextmanager
def signals_raise() -> Iterator[None]:
    """Raise ``Ended`` for SIGTERM and SIGHUP, where nobody handles or ignores them.

    The first one does: a second one in the middle of cleaning up changes nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    told = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal told
        if not told:
            told = True
            raise Ended(number)

    # nohup ignores SIGHUP, and that stays so.
    taken = [n for n in _SIGNALS if signal.getsignal(n) is signal.SIG_DFL]
    for number in taken:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
