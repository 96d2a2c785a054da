"""The circuit breaker with a fake clock, and what every store must do (here on the one in memory)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import StoreUnavailableError
from streams.breaker import BreakerState, CircuitBreaker
from streams.memory_store import MemoryStore
from tests.fakes import FakeClock
from tests.streams.store_contract import check_store


class Seconds:
    """A clock in seconds over a FakeClock."""

    def __init__(self) -> None:
        self.clock = FakeClock(0)

    def __call__(self) -> float:
        return self.clock() / 1000

    def advance(self, seconds: float) -> None:
        self.clock.advance(int(seconds * 1000))


def state_of(breaker: CircuitBreaker) -> BreakerState:
    return breaker.state


def test_the_breaker_opens_after_failures_in_a_row_and_refuses_at_once() -> None:
    breaker = CircuitBreaker(max_failures=3, retry_after_s=2, clock=Seconds())
    for outcome in (breaker.fail, breaker.fail, breaker.succeed, breaker.fail, breaker.fail):
        assert breaker.admit()
        outcome()
    assert state_of(breaker) is BreakerState.CLOSED
    breaker.fail()
    assert state_of(breaker) is BreakerState.OPEN
    assert not breaker.admit()
    assert breaker.num_refused == 1


def test_one_call_may_try_after_a_while_and_decides() -> None:
    clock = Seconds()
    breaker = CircuitBreaker(max_failures=1, retry_after_s=2, clock=clock)
    breaker.fail()
    clock.advance(1.9)
    assert not breaker.admit()
    clock.advance(0.1)
    assert breaker.admit()
    assert not breaker.admit()
    breaker.fail()
    assert not breaker.admit()
    clock.advance(2)
    assert breaker.admit()
    breaker.succeed()
    assert breaker.state is BreakerState.CLOSED
    assert breaker.admit()


def test_a_cancelled_trial_lets_another_try_at_once() -> None:
    clock = Seconds()
    breaker = CircuitBreaker(max_failures=1, retry_after_s=2, clock=clock)
    breaker.fail()
    clock.advance(2)
    assert breaker.admit()
    breaker.give_up()
    assert breaker.admit()


@given(st.lists(st.sampled_from(["ok", "fail", "cancel", "wait"])))
def test_the_breaker_never_stays_shut_for_ever(steps: list[str]) -> None:
    clock = Seconds()
    breaker = CircuitBreaker(max_failures=2, retry_after_s=1, clock=clock)
    for step in steps:
        if step == "wait":
            clock.advance(1)
        elif breaker.admit():
            {"ok": breaker.succeed, "fail": breaker.fail, "cancel": breaker.give_up}[step]()
    clock.advance(1)
    assert breaker.admit()


async def test_the_store_in_memory_keeps_the_contract() -> None:
    await check_store(MemoryStore())


async def test_values_and_lists_expire() -> None:
    clock = Seconds()
    store = MemoryStore(clock)
    await store.set("k", b"v", ttl_s=10)
    await store.append("l", "1", b"one", max_items=3, ttl_s=10)
    clock.advance(9.9)
    assert (await store.get("k"), await store.last("l", 5)) == (b"v", (b"one",))
    clock.advance(0.1)
    assert (await store.get("k"), await store.last("l", 5)) == (None, ())


async def test_a_store_that_is_down_says_so() -> None:
    store = MemoryStore()
    store.down = True
    with pytest.raises(StoreUnavailableError):
        await store.get("k")
