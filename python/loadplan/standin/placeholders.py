"""Stand-ins for an engine's kernel packages, which loading weights never calls.

With a GPU in sight SGLang imports its kernel packages at once, TokenSpeed always does.
Where they are not installed, placeholder modules let a loader run; whoever calls into
one gets an error.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

KERNEL_PACKAGES = (
    "deep_ep",
    "deep_gemm",
    "flash_attn",
    "flash_mla",
    "flashinfer",
    "cutlass",
    "humming",
    "quack",
    "sgl_kernel",
    "tilelang",
)

# What kernels are decorated with when a module is imported.
_DECORATORS = ("autotune", "heuristics", "jit")


class _Attributes(type):
    """A class whose every attribute is itself, as decorators and types need."""

    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls


class Placeholder(metaclass=_Attributes):
    """What every attribute of a placeholder module is."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        raise RuntimeError(
            "a kernel package is missing: loadplan loads weights without it, "
            "serving needs it installed"
        )


def _undecorated(*args: Any, **kwargs: Any) -> Callable:
    """A decorator, used bare or with arguments, that leaves its function alone."""
    if len(args) == 1 and callable(args[0]) and not kwargs:
        return args[0]
    return lambda function: function


class _Module(types.ModuleType):
    __version__ = "0.0"

    def __getattr__(self, name: str) -> Callable:
        if name.startswith("__"):
            raise AttributeError(name)
        return _undecorated if name in _DECORATORS else Placeholder


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: frozenset[str]):
        self._packages = packages

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.partition(".")[0] not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def serve_placeholders(
    packages: Iterable[str],
) -> tuple[importlib.abc.MetaPathFinder, frozenset[str]]:
    """Serve a placeholder for each of ``packages`` that is not installed.

    Returns:
        The new entry of ``sys.meta_path``, and what it serves.
    """
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    finder = _Finder(frozenset(missing))
    sys.meta_path.append(finder)
    return finder, frozenset(missing)


@contextlib.contextmanager
def kernel_placeholders() -> Iterator[None]:
    """Serve a placeholder for each kernel package of SGLang that is not installed."""
    finder, _ = serve_placeholders(KERNEL_PACKAGES)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
