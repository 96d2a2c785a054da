"""What counts as the recovery of a take-over, and what as a gap."""

from __future__ import annotations

import pytest

from ops.bench.chaos.checker import Seen
from ops.bench.chaos.gaps import Death, longest_gap_ms, take_overs
from ops.percentile import percentile
from tests.ops.bench.chaos.logs import claim, delta, end, log, taken_over, undisturbed

NOTICED = Death(worker="w", killed_ms=900, noticed_ms=1_005)


def saw(*arrivals: int) -> Seen:
    return Seen(request_id="r", arrivals=list(arrivals))


def test_recovery_counts_from_the_groups_notice_to_the_readers_next_token() -> None:
    (over,) = take_overs(taken_over(), saw(1_001, 1_025), [NOTICED])  # the claim stands at 1010, its text at 1020
    assert (over.recovery_ms, over.gap_ms) == (20, 24)


def test_a_take_over_without_a_death_has_a_gap_and_no_recovery() -> None:
    (over,) = take_overs(taken_over(), saw(1_001, 1_025), [])
    assert (over.recovery_ms, over.gap_ms) == (None, 24)


def test_a_death_that_was_noticed_long_before_the_last_token_is_not_the_cause() -> None:
    early = Death(worker="w", killed_ms=100, noticed_ms=200)
    (over,) = take_overs(taken_over(), saw(1_001, 1_025), [early])
    assert over.recovery_ms is None


def test_of_overlapping_deaths_the_last_that_was_noticed_counts() -> None:
    first = Death(worker="v", killed_ms=890, noticed_ms=1_002)
    (over,) = take_overs(taken_over(), saw(1_001, 1_025), [first, NOTICED])
    assert over.recovery_ms == 20


def test_a_taker_that_died_before_its_first_token_leaves_the_gap_to_the_next() -> None:
    entries = log(delta(1, 0, "hello", is_first=True), claim(2), claim(3), delta(3, 5, " there"), end(3, 3))
    (over,) = take_overs(entries, saw(1_001, 1_035), [])
    assert over.gap_ms == 34


def test_a_wait_falls_on_a_span_that_it_touches() -> None:
    (over,) = take_overs(taken_over(), saw(1_001, 1_025), [NOTICED])
    assert over.is_within([(0, 1_001)])
    assert over.is_within([(1_010, 1_011)])
    assert not over.is_within([(0, 1_000), (1_026, 2_000)])


def test_an_undisturbed_stream_has_no_take_over() -> None:
    assert take_overs(undisturbed(), saw(1_001, 1_011), [NOTICED]) == []


def test_the_longest_gap_of_a_stream_is_found() -> None:
    assert longest_gap_ms(saw(1, 5, 50, 60)) == 45
    assert longest_gap_ms(saw(1)) == 0


@pytest.mark.parametrize(("share", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.0, 1)])
def test_a_percentile_is_the_nearest_rank(share: float, value: int) -> None:
    assert percentile(list(range(100, 0, -1)), share) == value


def test_nothing_has_no_percentile() -> None:
    assert percentile([], 0.5) is None
