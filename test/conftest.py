"""Let tests import the helpers that lie beside them."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
for folder in ("loadplan", "gpu", "proof", "tokenspeed", "vllm"):
    sys.path.insert(0, str(HERE / folder))
sys.path.insert(0, str(HERE / "registered" / "unit" / "model_loader"))
sys.path.insert(0, str(HERE.parent / "tools"))

# vLLM's own switch; it looks once, when it is first imported.
os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")

_session = contextlib.ExitStack()

if os.environ.get("LOADPLAN_TEST_GPU") == "real":
    from loadplan.standin.placeholders import kernel_placeholders
    from loadplan.standin.real_gpu import CannotPretend

    # With a GPU in sight the engines import their kernels.
    _session.enter_context(kernel_placeholders())

    def pytest_runtest_makereport(
        item: pytest.Item, call: pytest.CallInfo[None]
    ) -> None:
        """Skip, with its reason, a test for which this machine is not the one."""
        if call.excinfo is None or not isinstance(call.excinfo.value, CannotPretend):
            return
        reason = str(call.excinfo.value)
        skipped = pytest.CallInfo.from_call(lambda: pytest.skip(reason), call.when)
        call.excinfo = skipped.excinfo


def pytest_unconfigure() -> None:
    _session.close()
