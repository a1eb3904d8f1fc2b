"""SHA-256 of tensors by name, in the background, with bounded memory."""

from __future__ import annotations

import concurrent.futures
import hashlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Any

import torch

# Bytes that wait for their digest at most: they are host memory.
_PENDING_BYTES = 1 << 30

# Every digest is over pieces of this size, so that a table is never held twice.
PIECE = 16 << 20


class Stopped(Exception):
    """The digests were given up before this one was done."""


class Digests:
    """Use it in a ``with`` block: however that ends, nothing goes on after it."""

    def __init__(self) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(os.cpu_count())
        self._room = threading.Condition()
        self._pending = 0
        self._stopped = False
        self._futures: dict[str, concurrent.futures.Future[str]] = {}

    def __enter__(self) -> Digests:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)

    @property
    def pending(self) -> int:
        """Bytes of tensors that are kept only to be hashed."""
        return self._pending

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Hash ``tensor`` (on the CPU, unchanged until then)."""
        nbytes = tensor.nbytes
        with self._room:
            self._room.wait_for(lambda: self._pending < _PENDING_BYTES)
            self._pending += nbytes

        def hash_it() -> str:
            try:
                return self._hash(str(tensor.dtype), tuple(tensor.shape), pieces())
            finally:
                with self._room:
                    self._pending -= nbytes
                    self._room.notify_all()

        def pieces() -> Iterator[memoryview]:
            raw = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())
            for begin in range(0, len(raw), PIECE):
                yield raw[begin : begin + PIECE]

        self._futures[name] = self._pool.submit(hash_it)

    def add_pieces(
        self, name: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[Any]
    ) -> None:
        """Hash a tensor whose bytes come piece by piece, made as they are asked for."""
        self._futures[name] = self._pool.submit(self._hash, dtype, shape, pieces)

    def result(self, done: Callable[[str], None] = lambda name: None) -> dict[str, str]:
        """All digests by name; ``done`` is called with each name."""
        found = {}
        for name, future in self._futures.items():
            found[name] = future.result()
            done(name)
        return found

    def _hash(self, dtype: str, shape: tuple[int, ...], pieces: Iterable[Any]) -> str:
        # The same bytes may be told to be something else: dtype and shape count.
        digest = hashlib.sha256(f"{dtype}{shape}".encode())
        for piece in pieces:
            if self._stopped:
                raise Stopped
            digest.update(piece)
        return digest.hexdigest()
