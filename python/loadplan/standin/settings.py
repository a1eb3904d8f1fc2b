"""What a caller or the environment chooses of InstantTensor's sizes, for the stub."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loadplan.standin.backends import backends_named


@dataclass(frozen=True, slots=True)
class Settings:
    """Choices of a caller or the environment; None leaves one to the library."""

    buffer_size: int | None
    chunk_size: int | None
    concurrency: int | None
    io_depth: int | None
    max_free_mem_usage: float | None
    backend: Any


_ENVIRONMENT: dict[str, Callable[[str], Any]] = {
    "buffer_size": int,
    "chunk_size": int,
    "concurrency": int,
    "io_depth": int,
    "max_free_mem_usage": float,
    "backend": backends_named,
}


def settings_from(arguments: Mapping[str, Any]) -> Settings:
    """Let an argument win over its INSTANTTENSOR_* variable."""
    chosen = {}
    for name, parse in _ENVIRONMENT.items():
        text = os.environ.get(f"INSTANTTENSOR_{name.upper()}")
        given = arguments[name]
        chosen[name] = parse(text) if given is None and text is not None else given
    return Settings(**chosen)
