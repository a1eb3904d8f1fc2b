"""Placeholders for kernel packages: importable, useless, and gone afterwards."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from loadplan.standin.placeholders import kernel_placeholders


def test_missing_kernel_package_imports_and_refuses_to_run() -> None:
    """Red when an import at module level fails where a GPU is in sight."""
    assert importlib.util.find_spec("sgl_kernel") is None
    with kernel_placeholders():
        module = importlib.import_module("sgl_kernel.quantization.fp8")
        assert module.anything.at_all is module.anything
        with pytest.raises(RuntimeError, match="serving needs it installed"):
            module.anything(1)
        with pytest.raises(AttributeError):
            module.__wrapped__  # noqa: B018
    assert importlib.util.find_spec("deep_gemm") is None


def test_installed_packages_and_others_are_left_alone() -> None:
    """Red when a package that is there is hidden, or any name can be imported."""
    with kernel_placeholders():
        assert importlib.import_module("numpy").array([1])[0] == 1
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_package")


def test_decorators_of_a_missing_package_leave_functions_alone() -> None:
    """Red when a module that defines kernels cannot be imported without a compiler."""
    with kernel_placeholders():
        module = importlib.import_module("tilelang.language")

        @module.jit
        def bare() -> int:
            return 1

        @module.autotune(configs=[1])
        def configured() -> int:
            return 2

    assert (bare(), configured()) == (1, 2)


def test_tokenspeed_sees_an_nvidia_device_until_a_test_chooses_another() -> None:
    """Red when its imports fail for want of a platform, or the hook does nothing."""
    importlib.import_module("loadplan.standin.tokenspeed")
    platform = importlib.import_module("tokenspeed_kernel.platform")
    before = platform.current_platform()
    assert before.is_nvidia and not before.is_amd and not before.is_cdna
    assert before.arch_version >= platform.ArchVersion(8, 0)
    with pytest.raises(AttributeError):
        before.warp_size  # noqa: B018
    try:
        amd = platform.PlatformInfo("amd", platform.ArchVersion(9, 4))
        platform.Platform.override(amd)
        assert platform.current_platform().is_amd
    finally:
        platform.Platform.override(before)
