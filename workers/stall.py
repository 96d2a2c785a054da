"""Whether an engine has work and makes no step any more: a worker that hangs must not look healthy.

Knows snapshots and a clock. The invariant: idle time never counts, however long it was before the work came.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from workers.stage import StageSnapshot


class StallWatch:
    """Looks at the snapshots of one stage, one after another; `limit_s` is how long a step may take at most."""

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit_s = limit_s
        self._clock = clock
        self._last_step_ms = 0
        self._waiting_since: float | None = None

    def is_stalled(self, snapshot: StageSnapshot) -> bool:
        """Take the next snapshot; return whether work has been there for `limit_s` without any step."""
        if not (snapshot.tokens_in_flight or snapshot.owes_step):
            self._waiting_since = None
            return False
        if self._waiting_since is None or snapshot.last_step_ms != self._last_step_ms:
            self._waiting_since, self._last_step_ms = self._clock(), snapshot.last_step_ms
        return self._clock() - self._waiting_since >= self._limit_s
