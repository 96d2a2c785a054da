"""What every test shares: suites that need real parts are skipped with a reason where these are absent."""

from __future__ import annotations

import structlog

# Tracebacks in colours and boxes take half a second each, over which the event loop stands still.
structlog.configure(
    processors=[
        *structlog.get_config()["processors"][:-1],
        structlog.dev.ConsoleRenderer(colors=False, exception_formatter=structlog.dev.plain_traceback),
    ]
)
