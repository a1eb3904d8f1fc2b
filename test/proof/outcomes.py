"""A pytest plugin that writes down how each test ended, and of what it failed.

``--outcomes FILE`` gets one JSON object: test id to outcome, markers and the name of
the first exception in the chain (SGLang's test case wraps what a test raised).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--outcomes", type=Path)


def pytest_configure(config: pytest.Config) -> None:
    config.outcomes = {}


def _first_cause(error: BaseException) -> BaseException:
    while cause := error.__cause__ or error.__context__:
        # What a test turned into an assertion of its own counts as one.
        if isinstance(error, AssertionError):
            break
        error = cause
    return error


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo):
    report = yield
    entry = item.config.outcomes.setdefault(
        item.nodeid, {"outcome": "passed", "errors": []}
    )
    entry["markers"] = sorted({mark.name for mark in item.iter_markers()})
    if call.excinfo is not None and not call.excinfo.errisinstance(
        pytest.skip.Exception
    ):
        entry["errors"].append(type(_first_cause(call.excinfo.value)).__name__)
    if report.outcome != "passed":
        entry["outcome"] = report.outcome
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    path = session.config.getoption("outcomes")
    if path is not None:
        path.write_text(json.dumps(session.config.outcomes))
