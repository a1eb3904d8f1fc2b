"""The journal of a load on the real InstantTensor and the real GPU, for the same tests.

What a test pretends of a machine (its free memory, a release, a refused registration)
cannot be had here: CannotPretend, for which a test is skipped.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from loadplan.standin.journal import HostRegistration, Journal


class CannotPretend(RuntimeError):
    """A test asks of the real machine to be another one."""


class RealJournal(Journal):
    """A journal that asks the tensor itself where it is."""

    def on_device(self, tensor: torch.Tensor) -> bool:
        return tensor.is_cuda


@contextlib.contextmanager
def real_gpu(journal: Journal | None = None, **pretended: Any) -> Iterator[Journal]:
    """Note the calls of the real library for a `with` block.

    Raises:
        CannotPretend: something is pretended that differs from this machine.
    """
    for name, value in pretended.items():
        raise CannotPretend(f"on a real GPU {name} cannot be made {value!r}")
    import instanttensor

    journal = RealJournal() if journal is None else journal
    cudart = _Cudart(torch.cuda.cudart(), journal)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
            (instanttensor, "safe_open", _noting(instanttensor.safe_open, journal)),
            (torch.cuda, "cudart", lambda: cudart),
        ):
            stack.enter_context(mock.patch.object(owner, name, value))
        yield journal


def _noting(safe_open: type, journal: Journal) -> type:
    class Noting(safe_open):
        # Callers read from it what this release can do.
        __signature__ = inspect.signature(safe_open)

        def __init__(self, filename, framework, device, process_group=None, **kwargs):
            one = isinstance(filename, str)
            journal.note_call(
                files=(filename,) if one else tuple(filename),
                device=device,
                process_group=process_group,
                kwargs=kwargs,
            )
            super().__init__(filename, framework, device, process_group, **kwargs)

        def tensors(self):
            for name, tensor in super().tensors():
                journal.names.append(name)
                yield name, tensor

    return Noting


class _Cudart:
    def __init__(self, cudart: Any, journal: Journal) -> None:
        self._cudart = cudart
        self._journal = journal

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cudart, name)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> Any:
        error = self._cudart.cudaHostRegister(address, nbytes, flags)
        registration = HostRegistration(address, nbytes, flags, int(error))
        self._journal.host_registrations.append(registration)
        return error
