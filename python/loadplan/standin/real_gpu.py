"""The record of a load on the real InstantTensor and the real GPU, for the same tests.

What a test pretends of a machine (its free memory, a release, a refused registration)
cannot be had here; such a test is skipped and says so.
"""

from __future__ import annotations

import contextlib
import inspect
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from loadplan.standin.records import HostRegistration, Record


class RealRecord(Record):
    """A record that asks the tensor itself where it is."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda


@contextlib.contextmanager
def real_gpu(record: Record | None = None, **pretended: Any) -> Iterator[Record]:
    """Record calls of the real library for a `with` block.

    Raises:
        unittest.SkipTest: something is pretended that differs from this machine.
    """
    for name, value in pretended.items():
        raise unittest.SkipTest(f"on a real GPU {name} cannot be made {value!r}")
    import instanttensor

    record = RealRecord() if record is None else record
    cudart = _Cudart(torch.cuda.cudart(), record)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (instanttensor, "safe_open", _recording(instanttensor.safe_open, record)),
            (torch.cuda, "cudart", lambda: cudart),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield record


def _recording(safe_open: type, record: Record) -> type:
    class Recording(safe_open):
        # Callers read from it what this release can do.
        __signature__ = inspect.signature(safe_open)

        def __init__(self, filename, framework, device, process_group=None, **kwargs):
            one = isinstance(filename, str)
            record.note_call(
                files=(filename,) if one else tuple(filename),
                device=device,
                process_group=process_group,
                kwargs=kwargs,
            )
            super().__init__(filename, framework, device, process_group, **kwargs)

        def tensors(self):
            for name, tensor in super().tensors():
                record.names.append(name)
                yield name, tensor

    return Recording


class _Cudart:
    def __init__(self, cudart: Any, record: Record) -> None:
        self._cudart = cudart
        self._record = record

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cudart, name)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        error = self._cudart.cudaHostRegister(address, nbytes, flags)
        registration = HostRegistration(address, nbytes, flags, int(error))
        self._record.host_registrations.append(registration)
        return error
