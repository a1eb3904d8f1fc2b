"""Which backend InstantTensor reads with, for the stub, and what that depends on.

Texts are those that users of the library see. `_019` and `_022` are the rules of the
releases 0.1.9 and 0.2.2.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

# statfs(2): TMPFS_MAGIC and RAMFS_MAGIC.
_MEMORY_FILESYSTEMS = frozenset({0x01021994, 0x858458F6})


class Backend(Enum):
    """How file bytes are read; the stub only lets it decide sizes."""

    AIO = 0
    AIO_BUFFERED = 1
    URING = 2
    URING_BUFFERED = 3
    CUFILE = 4
    MMAP = 5


class BackendPolicy(Enum):
    """A name that stands for several backends."""

    BUFFERED = "BUFFERED"


DIRECT = (Backend.URING, Backend.AIO)
_IN_MEMORY = (Backend.MMAP, Backend.URING_BUFFERED, Backend.AIO_BUFFERED)
THREADED = (Backend.MMAP, Backend.CUFILE)
_BUFFERED_019 = (Backend.URING_BUFFERED, Backend.AIO_BUFFERED, Backend.MMAP)
_BUFFERED_022 = (Backend.URING_BUFFERED, Backend.MMAP)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a choice is made.

    `least` gives every rank the smallest of the ranks' values (a collective call).
    """

    in_memory: bool
    world_size: int
    free_memory: int
    least: Callable[[int], int]


def in_memory(path: str) -> bool:
    """Whether `path` lies on tmpfs or ramfs; False for a path that cannot be asked."""
    buffer = ctypes.create_string_buffer(256)
    if ctypes.CDLL(None).statfs(os.fsencode(path), buffer) != 0:
        return False
    # Linux: the first member of struct statfs is f_type, one C long.
    return ctypes.c_ulong.from_buffer(buffer).value & 0xFFFFFFFF in _MEMORY_FILESYSTEMS


def lie_in_memory(paths: list[str]) -> bool:
    """Whether all of `paths` do; a ValueError where some do and some do not."""
    first = bool(paths) and in_memory(paths[0])
    for path in paths[1:]:
        if in_memory(path) != first:
            # Said of either order, as the library does.
            raise ValueError(
                "All files must be in the same filesystem. "
                f"{paths[0]} is in memory, but {path} is not."
            )
    return first


def backends_named(text: str) -> list[Backend | BackendPolicy]:
    known = {**Backend.__members__, **BackendPolicy.__members__}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise ValueError(
                f"backend={name} is invalid. Available backends: {known.keys()}"
            )
    if not names:
        raise ValueError("INSTANTTENSOR_BACKEND cannot be empty")
    return [known[name] for name in names]


def _candidates(asked: Any, buffered: tuple[Backend, ...]) -> list[Backend]:
    """The backends that `asked` names, policies replaced by what they stand for."""
    listed = asked if isinstance(asked, list) else [asked]
    if not listed:
        raise ValueError(
            "backend cannot be an empty list; use None to select the default backend "
            "candidates"
        )
    if not all(isinstance(one, Backend | BackendPolicy) for one in listed):
        raise TypeError("backend must be a `Backend`, `BackendPolicy`, or list of them")
    groups = (buffered if one is BackendPolicy.BUFFERED else (one,) for one in listed)
    return [backend for group in groups for backend in group]


def _first_usable(candidates: list[Backend], place: Place) -> Backend | None:
    usable = (b for b in candidates if not place.in_memory or b in _IN_MEMORY)
    return next(usable, None)


def choose_backend_019(asked: Any, place: Place) -> Backend:
    if asked is None:
        return Backend.MMAP if place.in_memory else DIRECT[0]
    candidates = _candidates(asked, _BUFFERED_019)
    backend = _first_usable(candidates, place)
    if backend is None:
        names = [backend.name for backend in candidates]
        reasons = [f"{name} is not supported for this filesystem" for name in names]
        raise RuntimeError(
            f"No available backend found from candidates [{', '.join(names)}]. "
            f"{'; '.join(reasons)}"
        )
    return backend


def choose_backend_022(asked: Any, place: Place) -> Backend:
    if asked is None:
        return Backend.MMAP if place.in_memory else DIRECT[0]
    backend = _first_usable(_candidates(asked, _BUFFERED_022), place)
    if backend is None:
        raise RuntimeError("No available backend was found among candidates []. ")
    return backend
