"""The nearest-rank percentile of what was measured. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence


def nearest_rank(values: Sequence[float], share: float) -> float:
    """Return the smallest of the values that `share` of them do not exceed. There must be one."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def percentile(values: Sequence[float], share: float) -> float | None:
    """Return the nearest-rank percentile, None of nothing."""
    return nearest_rank(values, share) if values else None
