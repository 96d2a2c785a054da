"""A circuit breaker: stops asking a part that is away, and finds it again. Pure, with the clock passed in."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum


class BreakerState(StrEnum):
    """Whether calls go through."""

    CLOSED = "closed"
    """All go through."""
    OPEN = "open"
    """None goes through."""
    HALF_OPEN = "half_open"
    """One is on its way to find out."""


class CircuitBreaker:
    """Opens after `max_failures` in a row; after `retry_after_s` one call may try. `clock` counts seconds."""

    def __init__(
        self, *, max_failures: int = 3, retry_after_s: float = 2.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.state = BreakerState.CLOSED
        self.num_refused = 0
        self._max_failures = max_failures
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._num_failures = 0
        self._opened_at = 0.0

    def admit(self) -> bool:
        """Return whether a call may go through; the one that may try counts as on its way."""
        if self.state is BreakerState.OPEN and self._clock() - self._opened_at >= self._retry_after_s:
            self.state = BreakerState.HALF_OPEN
            return True
        if self.state is BreakerState.CLOSED:
            return True
        self.num_refused += 1
        return False

    def succeed(self) -> None:
        """Note that a call was answered."""
        self.state = BreakerState.CLOSED
        self._num_failures = 0

    def fail(self) -> None:
        """Note that a call failed."""
        self._num_failures += 1
        if self.state is BreakerState.HALF_OPEN or self._num_failures >= self._max_failures:
            self.state = BreakerState.OPEN
            self._opened_at = self._clock()

    def give_up(self) -> None:
        """Note that a call was cancelled: nothing is known, another may try at once."""
        if self.state is BreakerState.HALF_OPEN:
            self.state = BreakerState.OPEN
