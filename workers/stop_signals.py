"""What signals do to a worker process: the first one drains it, a second one ends it at once.

Nothing is lost by that: what is not committed, another worker takes up.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import structlog

log = structlog.get_logger(__name__)

SAME_S = 1.0  # Ctrl-C reaches a process from the terminal, and from the parent that it has stopped


class StopSignals:
    """Counts signals; those within `SAME_S` of the first are one."""

    def __init__(
        self, on_first: Callable[[], None], on_second: Callable[[], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_first = on_first
        self._on_second = on_second
        self._clock = clock
        self._first_at: float | None = None

    def take(self) -> None:
        """Take a signal."""
        if self._first_at is None:
            self._first_at = self._clock()
            self._on_first()
        elif self._clock() - self._first_at >= SAME_S:
            self._on_second()


def end_at_once() -> None:
    """End the process without any further step."""
    log.warning("ended_at_once")
    os._exit(1)
