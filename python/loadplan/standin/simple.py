"""A GPU and InstantTensor for small tests of an engine's own loader.

Kinder than the library: it yields what official safetensors reads. What the library
gets wrong is imitated by ``standin.instanttensor``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any
from unittest import mock

import torch
from safetensors import safe_open


class Seen:
    """What a load did: ``calls`` of InstantTensor, and what was put on the device."""

    def __init__(self) -> None:
        self.calls: list[types.SimpleNamespace] = []
        self._placed: list[torch.Tensor] = []

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        self._placed.append(tensor)
        return tensor

    def on_device(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is one that was placed, or a view of one."""
        storage = tensor.untyped_storage()._cdata
        return any(t.untyped_storage()._cdata == storage for t in self._placed)

    @property
    def streamed(self) -> list[str]:
        """The names of the files that InstantTensor was given, in their order."""
        return [os.path.basename(file) for call in self.calls for file in call.files]


@contextlib.contextmanager
def simple_gpu(
    core: str,
    *,
    patches: Iterable[tuple[Any, str, Any]] = (),
    free_memory: int = 80 << 30,
) -> Iterator[Seen]:
    """Pretend for a ``with`` block that CUDA device 0 and InstantTensor are here.

    ``core`` is the package of the engine's copy of the core, which need not be there;
    ``patches`` are what else the engine asks of a device: owner, name, value.
    """
    seen = Seen()

    class Opened:
        # The parameter by which callers tell release 0.2 from those before.
        def __init__(
            self,
            filename: list[str],
            framework: str,
            device: Any,
            process_group: Any = None,
            tensor_filter: list[str] | None = None,
            **options: Any,
        ) -> None:
            files = list(filename)
            call = types.SimpleNamespace(
                files=files, group=process_group, options=options
            )
            seen.calls.append(call)
            self._tensors = [*_tensors(files, tensor_filter)]
            self.total_tensor_size = sum(tensor.nbytes for _, tensor in self._tensors)

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *error: object) -> None:
            pass

        def keys(self) -> list[str]:
            return [name for name, _ in self._tensors]

        def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
            for name, tensor in self._tensors:
                yield name, seen.place(tensor)

    library = types.ModuleType("instanttensor")
    library.safe_open = Opened
    replaced = [
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "mem_get_info", lambda device=None: (free_memory, free_memory)),
        *patches,
        *_device_functions(core, seen),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(sys.modules))
        sys.modules["instanttensor"] = library
        for owner, name, value in replaced:
            stack.enter_context(mock.patch.object(owner, name, value))
        yield seen


def _tensors(
    files: list[str], names: list[str] | None
) -> Iterator[tuple[str, torch.Tensor]]:
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in file.offset_keys():
                if names is None or name in names:
                    yield name, file.get_tensor(name).clone()


def _device_functions(core: str, seen: Seen) -> Iterator[tuple[Any, str, Any]]:
    """All that READ takes of a device."""
    functions = {
        "stream": ("put_on_device", lambda tensor, device: seen.place(tensor.clone())),
        "spans": (
            "device_buffer",
            lambda nbytes, device: seen.place(torch.empty(nbytes, dtype=torch.uint8)),
        ),
    }
    for module, (name, function) in functions.items():
        try:
            yield importlib.import_module(f"{core}.{module}"), name, function
        except ModuleNotFoundError:
            continue  # An engine without it, or a series before it.
