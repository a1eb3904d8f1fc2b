"""Send every tensor of a checkpoint straight to where it will live."""

from __future__ import annotations

__all__ = ["__version__"]


def __getattr__(name: str) -> str:
    # The core imports torch, which patching an engine does not need.
    if name == "__version__":
        from loadplan.core import VERSION

        return VERSION
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
