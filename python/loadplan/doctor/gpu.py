"""Is there a GPU with room, an InstantTensor for it, and memory it can reach?"""

from __future__ import annotations

import importlib
import inspect
import mmap
from importlib import metadata

import torch

from loadplan.doctor.finding import Finding, Need, Verdict
from loadplan.units import gib

_INSTALL = "pip install instanttensor==0.2.2"
_UNPATCHED = "--load-format safetensors loads without it"

# What it tries on its own, by where the files lie.
_ON_DISK = ("URING", "AIO")
_IN_MEMORY = ("MMAP",)


def probe(need: Need) -> list[Finding]:
    """InstantTensor and its backends, registered memory, the GPUs' memory."""
    return [*_instanttensor(need), _registration(need), *_gpus(need)]


def _instanttensor(need: Need) -> list[Finding]:
    about, tried = "InstantTensor", "importing it"
    try:
        module = importlib.import_module("instanttensor")
        version = metadata.version("instanttensor")
        parameters = inspect.signature(module.safe_open).parameters
    except Exception as error:  # its library may fail to link in ways of its own
        return [
            Finding(
                about,
                tried,
                f"{type(error).__name__}: {error}",
                Verdict.FAILS,
                "--load-format instanttensor cannot start",
                f"{_INSTALL}; {_UNPATCHED}",
            )
        ]
    old = "tensor_filter" not in parameters
    found = Finding(
        about,
        tried,
        f"version {version}",
        Verdict.SLOW if old else Verdict.OK,
        "files with unaligned tensors or FNUZ dtypes are read apart"
        if old
        else "every file without an oddity is streamed",
        _INSTALL if old else "",
    )
    return [found, _backends(module, need)]


def _backends(module: object, need: Need) -> Finding:
    wanted = _IN_MEMORY if need.in_memory else _ON_DISK
    about = "its backends"
    tried = f"asking it for {' and '.join(wanted)}"
    try:
        status = module._C.backend_status
        values = {name: module.Backend[name].value for name in wanted}
    except (AttributeError, KeyError):
        means = "the next lines tell what it would find"
        result = "this release does not tell"
        return Finding(about, tried, result, Verdict.UNTRIED, means)
    refused = {}
    for name, value in values.items():
        available, reason, _ = status(value)
        if not available:
            refused[name] = reason or "not available"
    if not refused:
        return Finding(about, tried, "available", Verdict.OK, "it has a way to read")
    return Finding(
        about,
        tried,
        "; ".join(f"{name}: {reason}" for name, reason in refused.items()),
        Verdict.FAILS if len(refused) == len(wanted) else Verdict.SLOW,
        "it finds no way to read the files"
        if len(refused) == len(wanted)
        else "it takes the next one",
        "see io_uring and AIO below, or INSTANTTENSOR_BACKEND=MMAP",
    )


def _registration(need: Need) -> Finding:
    about, tried = "registered memory", f"cudaHostRegister of {gib(need.pin)}"
    if not torch.cuda.is_available():
        return Finding(about, tried, "no GPU here", Verdict.UNTRIED, "unknown")
    result = _try_registration(need.pin)
    if need.layout is None:
        means = "not needed: no table lies in host memory"
        return Finding(about, tried, result or "works", Verdict.OK, means)
    if not result:
        means = "the GPU can read tables in host memory"
        return Finding(about, tried, "works", Verdict.OK, means)
    return Finding(
        about,
        tried,
        result,
        Verdict.FAILS,
        "the Engram tables cannot be placed on the host",
        "docker run --ulimit memlock=-1 --cap-add IPC_LOCK; with WSL or a small "
        'machine --engram-config \'{"placement": "gpu"}\'',
    )


def _try_registration(nbytes: int) -> str:
    """Why CUDA does not register so much, empty if it does."""
    try:
        memory = mmap.mmap(-1, nbytes)
    except OSError as error:
        return f"no memory to register: {error.strerror}"
    view = torch.frombuffer(memory, dtype=torch.uint8)
    cudart = torch.cuda.cudart()
    error = int(cudart.cudaHostRegister(view.data_ptr(), nbytes, 0))
    if error == 0:
        cudart.cudaHostUnregister(view.data_ptr())
    return f"refused: CUDA error {error}" if error else ""


def _gpus(need: Need) -> list[Finding]:
    tried = "asking CUDA for its free memory"
    if not torch.cuda.is_available():
        return [
            Finding(
                "GPU",
                tried,
                "no GPU here",
                Verdict.FAILS,
                "--load-format instanttensor needs an NVIDIA GPU",
                "docker run --gpus all; 'loadplan load' also runs without one",
            )
        ]
    return [_gpu(need, device, tried) for device in range(torch.cuda.device_count())]


def _gpu(need: Need, device: int, tried: str) -> Finding:
    about = f"GPU {device}"
    free, total = torch.cuda.mem_get_info(device)
    result = f"{gib(free)} of {gib(total)} are free"
    if need.gpu_bytes is None:
        return Finding(
            about, tried, result, Verdict.OK, "no checkpoint to compare with"
        )
    means = f"the load needs about {gib(need.gpu_bytes)}"
    if need.gpu_bytes <= free:
        return Finding(about, tried, result, Verdict.OK, means)
    change = "end what else uses it, or more GPUs (--tp)"
    return Finding(about, tried, result, Verdict.FAILS, means, change)
