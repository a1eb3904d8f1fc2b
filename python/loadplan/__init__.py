"""Send every tensor of a checkpoint straight to where it will live."""

from .core import VERSION as __version__

__all__ = ["__version__"]
