"""What every test shares: logging that no test leaves changed, and which tests never run beside each other."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import structlog

# Tracebacks in colours and boxes take half a second each, over which the event loop stands still.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

ALONE = {
    "servers": frozenset({"kafka", "redis", "browser", "chaos"}),
    "weights": frozenset({"model"}),
}
"""Tests with one of these marks keep their order in one process: they share servers, time limits and memory."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put what must not run beside its like into one group each, where a run is spread over processes by groups."""
    if not config.getoption("loadgroup", default=False):
        return
    for item in items:
        marks = {mark.name for mark in item.iter_markers()}
        group = next((name for name, those in ALONE.items() if marks & those), None)
        if group is not None:
            item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A test may run a command that sets up logging for its process; the tests after it see none of that."""
    root = logging.getLogger()
    handlers, level, before = list(root.handlers), root.level, structlog.get_config()
    yield
    root.handlers, root.level = handlers, level
    structlog.configure(**before)
