"""What is remembered of cancels, for how long, and who hears of one."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from schemas.errors import ConfigError, RequestCancelledError
from streams.cancellations import Cancellations
from tests.fakes import FakeClock

MAX_AGE_S, MAX_IDS = 10.0, 5


def made() -> tuple[Cancellations, FakeClock]:
    clock = FakeClock(0)
    return Cancellations(max_age_s=MAX_AGE_S, max_ids=MAX_IDS, clock=lambda: clock() / 1000), clock


def test_who_watches_is_told_at_once_and_who_comes_later_too() -> None:
    cancellations, _ = made()
    with cancellations.watch("r-1", "a") as first, cancellations.watch("r-1", "a") as second:
        assert not first.is_set()
        cancellations.cancel("r-1", "a", "changed my mind")
        assert first.is_set()
        assert second.is_set()
    with cancellations.watch("r-1", "a") as third:
        assert third.is_set()
    assert cancellations.reason("r-1", "a") == "changed my mind"
    assert cancellations.statistics()["watched"] == 0


def test_a_cancel_counts_for_its_own_tenant_only() -> None:
    cancellations, _ = made()
    with cancellations.watch("r-1", "a") as event:
        cancellations.cancel("r-1", "b")
        assert not event.is_set()
    assert not cancellations.is_cancelled("r-1", "a")
    assert cancellations.reason("r-1", "a") == ""


def test_the_first_reason_stays_and_ends_the_request() -> None:
    cancellations, _ = made()
    cancellations.cancel("r-1", "a", "first")
    cancellations.cancel("r-1", "a", "second")
    error = cancellations.error("r-1", "a")
    assert isinstance(error, RequestCancelledError)
    assert error.message == "first"
    assert cancellations.error("unknown", "a").message == "cancelled on request"


def test_a_cancel_is_forgotten_when_no_request_of_its_time_can_live_any_more() -> None:
    cancellations, clock = made()
    cancellations.cancel("r-1", "a")
    clock.advance(10_000)
    assert cancellations.is_cancelled("r-1", "a")
    clock.advance(1)
    assert not cancellations.is_cancelled("r-1", "a")


def test_who_works_on_a_request_is_told_even_if_the_cancel_is_pushed_out() -> None:
    cancellations, _ = made()
    with cancellations.watch("r-1", "a") as event:
        cancellations.cancel("r-1", "a")
        for number in range(MAX_IDS):
            cancellations.cancel(f"other-{number}", "a")
        assert event.is_set()
    assert not cancellations.is_cancelled("r-1", "a")


def test_bounds_out_of_range_are_named() -> None:
    with pytest.raises(ConfigError, match=r"cancellations\.max_ids"):
        Cancellations(max_ids=0)


class BoundedMemory(RuleBasedStateMachine):
    """Against a list of everything that was ever said: what is remembered is its newest part, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.cancellations, self.clock = made()
        self.said: list[tuple[str, int]] = []

    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        self.cancellations.cancel(f"r-{number}", "a")
        self.said.append((f"r-{number}", self.clock()))

    @rule(number=st.integers(0, 9))
    def alive(self, number: int) -> None:
        self.cancellations.leases.alive((f"r-{number}", "a"))

    @rule(ms=st.integers(1, 8_000))
    def wait(self, ms: int) -> None:
        self.clock.advance(ms)

    @invariant()
    def the_newest_are_remembered_and_nothing_else(self) -> None:
        last = dict(self.said)  # the last time that each was said
        newest = sorted(last, key=lambda id_: max(i for i, (said, _) in enumerate(self.said) if said == id_))[-MAX_IDS:]
        expected = {id_ for id_ in newest if self.clock() - last[id_] <= MAX_AGE_S * 1000}
        found = {f"r-{number}" for number in range(10) if self.cancellations.is_cancelled(f"r-{number}", "a")}
        assert found == expected
        statistics = self.cancellations.statistics()
        assert statistics["cancelled"] == len(expected)
        assert statistics["readers"] <= MAX_IDS


TestBoundedMemory = BoundedMemory.TestCase
TestBoundedMemory.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@given(st.lists(st.tuples(st.text(max_size=3), st.text(max_size=2)), max_size=50))
def test_memory_is_bounded_whatever_is_cancelled(keys: list[tuple[str, str]]) -> None:
    cancellations, _ = made()
    for key in keys:
        cancellations.cancel(*key)
    assert cancellations.statistics()["cancelled"] == min(MAX_IDS, len(set(keys)))
