"""What somebody may have meant by a word that nothing is called."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """A sentence to end a message with, empty where nothing is near."""
    near = difflib.get_close_matches(word.lower(), sorted(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
