"""What a load did, written down for tests."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the stub's `safe_open`.

    `files` is in the caller's order (the library sorts the list); `kwargs` holds the
    further keyword arguments that were really passed, without `framework`.
    """

    files: tuple[str, ...]
    device: int | str | torch.device
    process_group: dist.ProcessGroup | None
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HostRegistration:
    """One cudaHostRegister: address, bytes, flags and the CUDA error returned."""

    address: int
    nbytes: int
    flags: int
    error: int


class Journal:
    """What a load did: calls, yielded names, host registrations, device storages.

    ``bytes_read`` is what the stub read of tensors; ranks of a group share them.
    It keeps no tensor alive. Safe to use from several threads.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.names: list[str] = []
        self.bytes_read = 0
        self.host_registrations: list[HostRegistration] = []
        # A weak reference keeps the (small) storage object, not its bytes, so its
        # identity cannot be taken by a new storage while the entry stands.
        self._placed: dict[int, StorageWeakRef] = {}
        self._sweep_at = 1024
        self._lock = threading.Lock()

    def note_call(self, **fields: Any) -> None:
        """Append a `Call`; for the stub."""
        self.calls.append(Call(**fields))

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note the storage of `tensor` as device memory and return `tensor`."""
        reference = StorageWeakRef(tensor.untyped_storage())
        with self._lock:
            self._placed[reference.cdata] = reference
            if len(self._placed) > self._sweep_at:
                self._placed = {
                    key: ref for key, ref in self._placed.items() if not ref.expired()
                }
                self._sweep_at = max(1024, 2 * len(self._placed))
        return tensor

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is, or is a view of, a tensor that was placed.

        The storage object decides, not its address, so a zero-byte tensor is on the
        device exactly when it was put there.
        """
        with self._lock:
            return StorageWeakRef(tensor.untyped_storage()).cdata in self._placed
