"""A stub of the InstantTensor library that is as strict and as wrong as the real one.

It knows two releases, 0.1.9 and 0.2.2, and reads files on the CPU. Exception types
and the texts that users see are the library's, so that what is learnt here holds there;
`test/gpu/conform.py` compares both on a GPU. Known differences: every backend counts as
available, a process group may be of any kind, reads are never asynchronous, a view of
the ring never survives the next read, and where the library hangs or crashes the stub
raises a RuntimeError that says so.
"""

from __future__ import annotations

import importlib.machinery
import inspect
import types

from loadplan.standin.backends import Backend, BackendPolicy
from loadplan.standin.journal import Journal
from loadplan.standin.opened import SafeOpen019, SafeOpen022

_RELEASES: dict[str, type[SafeOpen022]] = {
    "0.1.9": SafeOpen019,
    "0.2.2": SafeOpen022,
}


def make_module(
    version: str, *, journal: Journal, free_memory: int
) -> types.ModuleType:
    """Build a module object that stands for one release of `instanttensor`.

    Args:
        version: "0.2.2" or "0.1.9".
        journal: Takes every call, yielded name and placed storage.
        free_memory: Free memory of the pretended device, in bytes.

    Raises:
        ValueError: For a release that the stub does not know.
    """
    if version not in _RELEASES:
        raise ValueError(
            f"instanttensor stub: version {version!r}, expected one of "
            f"{sorted(_RELEASES)}"
        )
    release = _RELEASES[version]
    # Python names it in the error for an unknown argument.
    release.__init__.__qualname__ = "safe_open.__init__"
    signature = inspect.signature(release.__init__)
    parameters = list(signature.parameters.values())[1:]
    safe_open = type(
        "safe_open",
        (release,),
        {
            "_journal": journal,
            "_free_memory": free_memory,
            # `__new__` would hide the arguments from inspect.signature(safe_open).
            "__signature__": signature.replace(parameters=parameters),
        },
    )
    module = types.ModuleType("instanttensor", "InstantTensor, as a stub.")
    # find_spec() raises for a loaded module without one.
    module.__spec__ = importlib.machinery.ModuleSpec("instanttensor", loader=None)
    module.__all__ = ["Backend", "BackendPolicy", "safe_open"]
    module.Backend = Backend
    module.BackendPolicy = BackendPolicy
    module.safe_open = safe_open
    return module
