"""Warnings of the stub, told where its user reads them."""

from __future__ import annotations

import sys
import warnings


def warn(message: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn at the line of the first caller outside these stand-ins."""
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and _is_stub(frame.f_globals.get("__name__", "")):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)


def _is_stub(module: str) -> bool:
    return module.startswith(f"{__package__}.")
