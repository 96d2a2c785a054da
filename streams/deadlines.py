"""Bounds many waits at once: a producer waits for thousands of acknowledgements, and a timer for each is dear.

One timer serves all. The invariant: a wait ends at its deadline, late by no more than the event loop is, and a future
that is not waited for any more is forgotten.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


class Deadlines:
    """Futures that are waited for, each until a time of the event loop."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Future[object], float] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._fires_at = 0.0

    @property
    def num_waiting(self) -> int:
        """Return how many futures are waited for."""
        return len(self._open)

    async def await_until(self, deadline: float, future: asyncio.Future[T]) -> T:
        """Return the future's result. At `deadline` it gets a TimeoutError. One wait for each future."""
        self._open[future] = deadline  # type: ignore[index]  # a future is invariant, and any will do
        if self._timer is None or deadline < self._fires_at:
            self._set_timer(deadline)
        try:
            return await future
        finally:
            del self._open[future]  # type: ignore[arg-type]

    def _set_timer(self, fires_at: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._fires_at = fires_at
        self._timer = asyncio.get_running_loop().call_at(fires_at, self._expire)

    def _expire(self) -> None:
        self._timer = None
        for future, deadline in self._open.items():
            if deadline <= self._fires_at and not future.done():
                future.set_exception(TimeoutError())
        later = [deadline for deadline in self._open.values() if deadline > self._fires_at]
        if later:
            self._set_timer(min(later))
