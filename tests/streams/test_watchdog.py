"""When a group member counts as stuck."""

from __future__ import annotations

import pytest

from streams.watchdog import Stuck, Vitals, diagnose

STUCK_S = 10.0
LONG_AGO, JUST_NOW, NOW = 50.0, 95.0, 100.0


@pytest.mark.parametrize(
    ("vitals", "expected"),
    [
        (Vitals(now=NOW, heard_since=0.0, polled_at=JUST_NOW), None),
        (Vitals(now=NOW, heard_since=0.0, polled_at=LONG_AGO), Stuck.SILENT_POLL),
        (Vitals(now=NOW, heard_since=0.0, polled_at=NOW - STUCK_S), None),
        (Vitals(now=NOW, heard_since=None, polled_at=LONG_AGO), None),
        (Vitals(now=NOW, heard_since=JUST_NOW, polled_at=LONG_AGO), None),
        (Vitals(now=NOW, heard_since=0.0, polled_at=JUST_NOW, rebalancing_since=JUST_NOW), None),
        (Vitals(now=NOW, heard_since=0.0, polled_at=JUST_NOW, rebalancing_since=LONG_AGO), Stuck.ENDLESS_REBALANCE),
        (Vitals(now=NOW, heard_since=JUST_NOW, polled_at=JUST_NOW, rebalancing_since=LONG_AGO), None),
        (Vitals(now=NOW, heard_since=None, polled_at=JUST_NOW, rebalancing_since=LONG_AGO), None),
        (Vitals(now=NOW, heard_since=0.0, polled_at=JUST_NOW, idle_since=JUST_NOW), None),
        (Vitals(now=NOW, heard_since=0.0, polled_at=JUST_NOW, idle_since=LONG_AGO), Stuck.NO_PROGRESS),
        (Vitals(now=NOW, heard_since=None, polled_at=JUST_NOW, is_dead=True), Stuck.DEAD),
    ],
)
def test_only_silence_while_the_broker_is_heard_counts(vitals: Vitals, expected: Stuck | None) -> None:
    assert diagnose(vitals, STUCK_S) is expected
