"""Keeps a library from filling the disk while Kafka is away: each place in its code speaks once in a while.

aiokafka tells of every try of every connection, hundreds of times a second. Our own events are never held back.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

PACED = "aiokafka"
PAUSE_S = 10.0


class LogPace(logging.Filter):
    """A filter for a handler. What it lets through tells as `num_held_back` how often it was not, since the last."""

    def __init__(self, *, pause_s: float = PAUSE_S, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._pause_s = pause_s
        self._clock = clock
        self._told: dict[tuple[str, int], tuple[float, int]] = {}  # by place in the code: when, and how many since

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether a record is written."""
        if record.name.partition(".")[0] != PACED:
            return True
        place, now_s = (record.pathname, record.lineno), self._clock()
        told_s, num_held_back = self._told.get(place, (now_s - self._pause_s, 0))
        if now_s - told_s < self._pause_s:
            self._told[place] = (told_s, num_held_back + 1)
            return False
        self._told[place] = (now_s, 0)
        if num_held_back:
            record.num_held_back = num_held_back
        return True
