"""Notices a group member that is alive but stuck, so that it can be replaced.

Pure: takes what is known of a member and says what is wrong with it, if anything. A broker that is away is not the
member's fault: only time over which the broker was heard counts.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Stuck(StrEnum):
    """What is wrong with a member."""

    DEAD = "dead"
    """The part of the client that keeps the membership has ended."""
    SILENT_POLL = "silent_poll"
    """A poll does not return."""
    ENDLESS_REBALANCE = "endless_rebalance"
    """Partitions were taken away, and none are given."""
    NO_PROGRESS = "no_progress"
    """Records wait, none is received, none is in work, and no partition is paused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Vitals:
    """A member at one moment; times are the event loop's, in seconds."""

    now: float
    heard_since: float | None
    """Since when the broker has answered without a break; None while it does not."""
    polled_at: float
    """When the last poll returned, or the first began."""
    rebalancing_since: float | None = None
    idle_since: float | None = None
    """Since when records wait although nothing keeps the member from receiving them."""
    is_dead: bool = False


def diagnose(vitals: Vitals, stuck_s: float) -> Stuck | None:
    """Return what has been wrong with a member for longer than `stuck_s`."""
    if vitals.is_dead:
        return Stuck.DEAD
    if vitals.heard_since is None:
        return None
    for since, symptom in (
        (vitals.polled_at, Stuck.SILENT_POLL),
        (vitals.rebalancing_since, Stuck.ENDLESS_REBALANCE),
        (vitals.idle_since, Stuck.NO_PROGRESS),
    ):
        if since is not None and vitals.now - max(since, vitals.heard_since) > stuck_s:
            return symptom
    return None
