"""A machine without a GPU that looks enough like one to run a whole load.

For `loadplan load` and the tests only. "The device" is a set of CPU storages that a
`Journal` knows: those the InstantTensor stub yields and those READ takes. A tensor
computed from a placed one is NOT on the device here, a view of it is.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from loadplan.standin import instanttensor
from loadplan.standin.journal import HostRegistration, Journal
from loadplan.standin.real_gpu import real_gpu

DEFAULT_FREE_MEMORY = 80 * 1024**3
_CUDA_ERROR_MEMORY_ALLOCATION = 2
_STUB = "instanttensor"


def make_module(
    version: str = "0.2.2",
    *,
    journal: Journal | None = None,
    free_memory: int = DEFAULT_FREE_MEMORY,
) -> types.ModuleType:
    """Build the InstantTensor stub of one release ("0.2.2" or "0.1.9").

    Args:
        version: The release to imitate, faults included.
        journal: Takes calls, names and placed storages; a new one if None.
        free_memory: Free memory of the pretended device, in bytes.

    Raises:
        ValueError: For a release that the stub does not know.
    """
    return instanttensor.make_module(
        version,
        journal=Journal() if journal is None else journal,
        free_memory=free_memory,
    )


@contextlib.contextmanager
def fake_gpu(
    *,
    engine: str = "sglang",
    version: str = "0.2.2",
    free_memory: int = DEFAULT_FREE_MEMORY,
    host_register_limit: int | None = None,
    journal: Journal | None = None,
) -> Iterator[Journal]:
    """Pretend for a `with` block that CUDA device 0 and InstantTensor are here.

    Replaced and put back: `sys.modules["instanttensor"]`, `torch.cuda.current_device`,
    `torch.cuda.cudart` and `torch.cuda.mem_get_info`, READ's `device_buffer`; where
    the engine can be imported also its platform's device and what else it asks of one.
    Whatever code is imported inside the block stays imported. LOADPLAN_TEST_GPU=real
    in the environment replaces nothing: the real ones are noted.

    Args:
        engine: The engine whose loader will run, "sglang", "tokenspeed" or "vllm".
        version: The InstantTensor release to imitate, "0.2.2" or "0.1.9".
        free_memory: Free memory of the pretended device, in bytes.
        host_register_limit: Registrations of more bytes fail, as under a locked-memory
            limit; None lets all succeed.
        journal: Journal to continue; a new one if None.

    Yields:
        The journal.
    """
    if os.environ.get("LOADPLAN_TEST_GPU") == "real":
        pretended = {
            name: value
            for name, value, default in (
                ("version", version, "0.2.2"),
                ("free_memory", free_memory, DEFAULT_FREE_MEMORY),
                ("host_register_limit", host_register_limit, None),
            )
            if value != default
        }
        with real_gpu(journal, **pretended) as journal:
            yield journal
        return
    journal = Journal() if journal is None else journal
    stub = make_module(version, journal=journal, free_memory=free_memory)

    cudart = _Cudart(journal, host_register_limit)
    # Imported before anything is patched: an import must not see a half-made GPU.
    patches = [
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "cudart", lambda: cudart),
        (torch.cuda, "mem_get_info", lambda device=None: (free_memory, free_memory)),
        *_core_patches(engine, journal),
        *_ENGINE_PATCHES.get(engine, list)(),
    ]
    with contextlib.ExitStack() as stack:
        stack.enter_context(_loaded(_STUB, stub))
        for owner, name, value in patches:
            stack.enter_context(_attribute(owner, name, value))
        yield journal


class _CudaError(int):
    """A status as PyTorch's enumeration gives it: engines ask for either form."""

    @property
    def value(self) -> int:
        return int(self)


class _Cudart:
    """The part of `torch.cuda.cudart()` that pins memory which is already mapped."""

    def __init__(self, journal: Journal, limit: int | None) -> None:
        self._journal = journal
        self._limit = limit

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> _CudaError:
        fails = self._limit is not None and nbytes > self._limit
        error = _CudaError(_CUDA_ERROR_MEMORY_ALLOCATION if fails else 0)
        self._journal.host_registrations.append(
            HostRegistration(address, nbytes, flags, error)
        )
        return error


# Where each patched engine has its copy of the core.
_CORES = {
    "sglang": "sglang.srt.model_loader.loadplan",
    "tokenspeed": "tokenspeed.runtime.model_loader.loadplan",
    "vllm": "vllm.model_executor.model_loader.loadplan",
}


def _core_patches(engine: str, journal: Journal) -> Iterator[tuple[Any, str, Any]]:
    """All that READ takes of a device: in the library, and in a patched engine."""

    def device_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
        return journal.place(torch.empty(nbytes, dtype=torch.uint8))

    def put_on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        return journal.place(tensor.clone())

    for core in ("loadplan.core", _CORES[engine]):
        for name, value in (
            ("spans.device_buffer", device_buffer),
            ("stream.put_on_device", put_on_device),
        ):
            layer, _, function = name.partition(".")
            module = _module(f"{core}.{layer}")
            if module is not None:
                yield module, function, value


def _sglang_patches() -> list[tuple[Any, str, Any]]:
    platforms = _module("sglang.srt.platforms")
    if platforms is None:
        return []
    engram = importlib.import_module("sglang.srt.layers.engram")
    platform = platforms.current_platform
    return [
        (platform, "device_type", "cuda"),
        (platform, "get_device", lambda device_id=0: torch.device("cuda", device_id)),
        # Only a sort order hangs on it, and asking needs the CUDA driver.
        (engram, "_sorted_host_reads", lambda device: False),
    ]


def _vllm_patches() -> list[tuple[Any, str, Any]]:
    loader = "vllm.model_executor.model_loader"
    modules = [
        _module(f"{loader}.{name}") for name in ("weight_utils", "planned_weights")
    ]
    return [
        (module, "current_platform", _CudaPlatform(module.current_platform))
        for module in modules
        if module is not None
    ]


class _CudaPlatform:
    """vLLM's platform for the code that loads; the engine keeps its own."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def is_cuda(self) -> bool:
        return True

    def current_device(self) -> int:
        return 0


_ENGINE_PATCHES = {"sglang": _sglang_patches, "vllm": _vllm_patches}


def _module(name: str) -> types.ModuleType | None:
    """Import `name`; None where it, or a package that holds it, is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{name}.".startswith(f"{error.name}."):
            return None
        raise


@contextlib.contextmanager
def _loaded(name: str, module: types.ModuleType) -> Iterator[None]:
    # Not mock.patch.dict: it would also forget every module imported meanwhile.
    before = sys.modules.get(name)
    sys.modules[name] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules[name]
        else:
            sys.modules[name] = before


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set `owner.name`; afterwards restore it, or remove it if a class provides it."""
    present, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if present:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
