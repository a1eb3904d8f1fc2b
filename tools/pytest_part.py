"""A pytest plugin: ``--part=I/N`` runs every N-th test, from the I-th."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", default="0/1")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    part, parts = map(int, config.getoption("part").split("/"))
    items[:] = items[part::parts]
