"""Numbers as arguments: each with the range that it may have, told when it is left.

argparse puts the option's name in front of a refusal; value and range are said here.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable

from loadplan import units

_SHOWN = 40
# Digits enough for every range below, and few enough to be turned into a number.
_MOST_DIGITS = 30

MOST_GPUS = 1 << 16


def whole(low: int, high: int) -> Callable[[str], int]:
    """Takes whole numbers from ``low`` to ``high``, both included."""

    def parse(text: str) -> int:
        number = None
        if re.fullmatch(rf"[+-]?[0-9]{{1,{_MOST_DIGITS}}}", text):
            number = int(text)
        if number is None or not low <= number <= high:
            raise _refusal(text, f"a whole number from {low} to {high}")
        return number

    return parse


def fraction(low: float, high: float) -> Callable[[str], float]:
    """Takes decimal numbers from ``low`` to ``high``, both included."""

    def parse(text: str) -> float:
        number = None
        if re.fullmatch(rf"\+?[0-9]{{0,{_MOST_DIGITS}}}\.?[0-9]{{1,400}}", text):
            number = float(text)
        if number is None or not low <= number <= high:
            raise _refusal(text, f"a number from {low} to {high}")
        return number

    return parse


def size(low: str, high: str) -> Callable[[str], int]:
    """Takes sizes with a unit, like ``24G``, as bytes: ``low`` to ``high``.

    A number alone is refused: 512 is as likely meant as GiB as it is meant as bytes.
    """
    least, most = units.parse(low), units.parse(high)

    def parse(text: str) -> int:
        try:
            number = units.parse(text)
        except ValueError:
            number = None
        if number is None or text[-1:].isdecimal() or not least <= number <= most:
            raise _refusal(
                text, f"a size with its unit, like 24G, from {low} to {high}"
            )
        return number

    return parse


def _refusal(text: str, expected: str) -> argparse.ArgumentTypeError:
    shown = repr(text)
    if len(shown) > _SHOWN:
        shown = f"{shown[: _SHOWN - 3]}..."
    return argparse.ArgumentTypeError(f"{shown} given, expected {expected}")
