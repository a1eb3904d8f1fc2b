"""Placeholders for kernel packages: importable, useless, and gone afterwards."""

from __future__ import annotations

import importlib
import importlib.util

import pytest

from loadplan.placeholders import kernel_placeholders


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
