"""What goes wrong with an engine's files, apart from the core, which imports torch."""

from __future__ import annotations


class EngineError(ValueError):
    """An engine's tree is not what its patches need, or cannot be written."""
