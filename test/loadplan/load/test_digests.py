"""Digests in the background."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from loadplan.load.digests import Digests


def test_digest_that_is_given_up_ends_at_the_next_piece() -> None:
    """Red when an interrupted load hashes a table of 90 GiB to its end."""
    begun, go_on = threading.Event(), threading.Event()

    def endless() -> Iterator[bytes]:
        while True:
            begun.set()
            go_on.wait(60)
            yield b"more"

    with pytest.raises(KeyboardInterrupt), Digests() as digests:
        digests.add_pieces("a", "uint8", (1,), endless())
        assert begun.wait(60)
        # What follows runs when the block has already been left.
        threading.Timer(0.2, go_on.set).start()
        raise KeyboardInterrupt
