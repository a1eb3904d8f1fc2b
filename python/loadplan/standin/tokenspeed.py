"""TokenSpeed on a machine without its kernel packages, as far as loading goes.

It imports them at once and they refuse to be imported without a GPU. Where they are
not installed, importing this module serves placeholders for the rest of the process:
import it before TokenSpeed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import sys
import types
from collections.abc import Iterator
from unittest import mock

import torch

from loadplan.standin.placeholders import serve_placeholders

KERNEL_PACKAGES = ("tokenspeed_kernel", "tokenspeed_scheduler", "tokenspeed_triton")
_PLATFORM = "tokenspeed_kernel.platform"


@dataclasses.dataclass(frozen=True, order=True)
class ArchVersion:
    """A compute capability."""

    major: int
    minor: int


@dataclasses.dataclass(frozen=True)
class PlatformInfo:
    """What TokenSpeed asks of a device, in the names of its kernel package."""

    vendor: str
    arch_version: ArchVersion

    @property
    def is_nvidia(self) -> bool:
        return self.vendor == "nvidia"

    @property
    def is_amd(self) -> bool:
        return self.vendor == "amd"

    def register_host_tensor_for_gpu_access(self, tensor: torch.Tensor) -> None:
        """Pin memory that is mapped already; only asked for where there is a GPU."""
        cudart = torch.cuda.cudart()
        error = cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)
        if int(error) != 0:
            raise RuntimeError(
                f"cudaHostRegister of {tensor.nbytes} B failed with error {int(error)}"
            )

    def __getattr__(self, name: str) -> bool:
        # Of the architectures and vendors it asks for, this is none.
        if name.startswith("is_"):
            return False
        raise AttributeError(name)


class Platform:
    """The hook of the kernel package by which tests choose a device."""

    _info = PlatformInfo(vendor="nvidia", arch_version=ArchVersion(8, 0))

    @classmethod
    def get(cls) -> PlatformInfo:
        return cls._info

    @classmethod
    def override(cls, info: PlatformInfo) -> None:
        cls._info = info


def _serve_kernels() -> None:
    _, served = serve_placeholders(KERNEL_PACKAGES)
    if _PLATFORM.partition(".")[0] not in served:
        return
    module = types.ModuleType(_PLATFORM)
    module.ArchVersion = ArchVersion
    module.Platform = Platform
    module.PlatformInfo = PlatformInfo
    module.current_platform = Platform.get
    module.pdl_enabled = lambda overwrite=None: False
    sys.modules[_PLATFORM] = module


@contextlib.contextmanager
def fake_moe_kernels() -> Iterator[None]:
    """Let MoE layers be built and loaded without the kernels that will run them."""
    plan = {
        "solution": "triton",
        "support_routing": False,
        "supports_deferred_finalize": False,
        "supports_all_to_all_ep": False,
    }
    kernels = importlib.import_module("tokenspeed_kernel")
    with contextlib.ExitStack() as stack:
        for name, result in (("moe_plan", plan), ("moe_process_weights", None)):
            fake = mock.Mock(return_value=result)
            stack.enter_context(mock.patch.object(kernels, name, fake))
        yield


_serve_kernels()
