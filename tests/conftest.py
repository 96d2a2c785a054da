"""What every test shares: suites that need real parts are skipped with a reason where these are absent."""

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


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A test may run a command that sets up logging for its process; the tests after it see none of that."""
    root = logging.getLogger()
    handlers, level, before = list(root.handlers), root.level, structlog.get_config()
    yield
    root.handlers, root.level = handlers, level
    structlog.configure(**before)
