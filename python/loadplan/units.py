"""Sizes as people write and read them, in binary units."""

from __future__ import annotations

import re

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def parse(text: str) -> int:
    """Bytes of a size like ``24G``.

    Raises:
        ValueError: it is none.
    """
    match = re.fullmatch(
        r"([0-9]{1,20}(?:\.[0-9]{1,20})?)([KMGT]?)(?:i?B)?", text, re.IGNORECASE
    )
    if match is None:
        raise ValueError(f"{text!r} is no size, expected one like 24G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def gib(nbytes: int) -> str:
    """``nbytes`` to two places, in GiB or, below one, in MiB."""
    if nbytes >= 1 << 30:
        return f"{nbytes / (1 << 30):.2f} GiB"
    return f"{nbytes / (1 << 20):.2f} MiB"
