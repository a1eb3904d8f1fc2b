"""What an engine prints while it is imported and loads, kept apart from our output."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

_STDOUT, _STDERR = 1, 2


@contextlib.contextmanager
def kept_in(log: Path) -> Iterator[tuple[TextIO, TextIO]]:
    """Write into ``log`` all that this process prints, compiled code and children too.

    Yields what stdout and stderr were before, for output of our own. They are put back
    at the end. ``log`` is made anew and stays open: a logger's handler that was made
    here goes on writing to it.

    Raises:
        OSError: ``log`` cannot be written.
    """
    # Never closed: see above.
    file = open(log, "w", buffering=1, encoding="utf-8", errors="backslashreplace")
    before = sys.stdout, sys.stderr
    for stream in before:
        stream.flush()
    with contextlib.ExitStack() as stack:
        ours = []
        for descriptor in (_STDOUT, _STDERR):
            kept = os.dup(descriptor)
            ours.append(stack.enter_context(open(kept, "w", buffering=1)))
            stack.callback(os.dup2, kept, descriptor)
            os.dup2(file.fileno(), descriptor)
        sys.stdout = sys.stderr = file
        try:
            yield ours[0], ours[1]
        finally:
            sys.stdout, sys.stderr = before
