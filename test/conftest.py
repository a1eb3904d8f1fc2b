"""Let tests import the helpers that lie beside them."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
for folder in ("loadplan", "gpu", "proof", "tokenspeed", "vllm"):
    sys.path.insert(0, str(HERE / folder))
sys.path.insert(0, str(HERE / "registered" / "unit" / "model_loader"))
sys.path.insert(0, str(HERE.parent / "tools"))

_session = contextlib.ExitStack()

if os.environ.get("LOADPLAN_TEST_GPU") == "real":
    from loadplan.standin.placeholders import kernel_placeholders

    # With a GPU in sight the engines import their kernels.
    _session.enter_context(kernel_placeholders())


def pytest_unconfigure() -> None:
    _session.close()
