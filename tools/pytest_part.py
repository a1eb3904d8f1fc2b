"""A pytest plugin: ``--part=I/N`` runs the I-th of N equal runs of tests, from 0.

Neighbours stay together, since they may share a fixture.
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    part, parts = map(int, config.getoption("part").split("/"))
    items[:] = items[len(items) * part // parts : len(items) * (part + 1) // parts]
