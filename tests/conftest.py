"""What every test shares: logging that no test leaves changed, and which tests never run beside each other."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

ROOT = Path(__file__).resolve().parents[1]

# How long an example takes says something about the neighbours on this machine only.
settings.register_profile("any pace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any pace")

# Tracebacks in colours and boxes take half a second each, over which the event loop stands still.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)

IN_TURN = {
    "servers": re.compile(r"pytest\.mark\.(kafka|redis|browser|chaos)\b"),
    "weights": re.compile(r"pytest\.mark\.model\b"),
}
"""Files with one of these marks keep their order in one process: they share servers, time limits and memory."""


class InTurn(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Spreads files over processes; what must not run beside its like goes to one of them."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid.partition("::")[0])


@cache
def scope_of(file: str) -> str:
    """Return the group of a file, or the file itself where it may run beside any other."""
    text = (ROOT / file).read_text(encoding="utf-8")
    return next((name for name, mark in IN_TURN.items() if mark.search(text)), file)


@pytest.hookimpl(optionalhook=True)  # there is none with `-p no:xdist`
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> InTurn | None:
    """Say how `--dist loadscope` spreads the tests."""
    return InTurn(config, log) if config.getoption("dist") == "loadscope" else None


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A test may run a command that sets up logging for its process; the tests after it see none of that."""
    root = logging.getLogger()
    handlers, level, before = list(root.handlers), root.level, structlog.get_config()
    yield
    root.handlers, root.level = handlers, level
    structlog.configure(**before)
