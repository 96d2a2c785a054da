"""The wall clock, in the unit that records carry."""

from __future__ import annotations

import time


def now_ms() -> int:
    """Return the Unix time in milliseconds."""
    return time.time_ns() // 1_000_000
