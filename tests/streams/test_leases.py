"""When a reader counts as gone."""

from __future__ import annotations

import pytest

from streams.cancellations import Cancellations
from tests.fakes import FakeClock

KEY = ("r-1", "a")


class Leases:
    """One request with a lease of 10 s, held from second 0 on by a clock of ours."""

    def __init__(self) -> None:
        self.clock = FakeClock(0)
        self.cancellations = Cancellations(clock=lambda: self.clock() / 1000)
        self.watch = self.cancellations.leases
        self.watch.hear(True)

    def at(self, second: float) -> bool:
        """Return whether the request is given up at that second."""
        self.clock.now_ms = int(second * 1000)
        self.watch.check()
        return self.cancellations.is_cancelled(*KEY)


def test_a_reader_who_never_says_anything_is_gone_one_lease_after_the_request_came() -> None:
    leases = Leases()
    with leases.cancellations.watch(*KEY, lease_s=10) as cancelled:
        assert not leases.at(9.9)
        assert leases.at(10)
        assert cancelled.is_set()
    assert leases.cancellations.reason(*KEY) == "reader is gone"
    assert leases.watch.num_held == 0


def test_each_word_of_a_reader_begins_the_lease_anew() -> None:
    leases = Leases()
    with leases.cancellations.watch(*KEY, lease_s=10):
        for second in range(5, 60, 5):
            assert not leases.at(second)
            leases.watch.alive(KEY)
        assert not leases.at(64.9)
        assert leases.at(65)


def test_the_reader_of_another_tenants_request_does_not_count() -> None:
    leases = Leases()
    with leases.cancellations.watch(*KEY, lease_s=10):
        assert not leases.at(9)
        leases.watch.alive(("r-1", "b"))
        assert leases.at(10)


def test_of_two_readers_either_keeps_the_request_alive() -> None:
    leases = Leases()
    with leases.cancellations.watch(*KEY, lease_s=10):
        for second in (4, 8):  # one reader, who then dies
            assert not leases.at(second)
            leases.watch.alive(KEY)
        for second in (11, 20):  # the other one
            assert not leases.at(second)
            leases.watch.alive(KEY)
        assert leases.at(30)


def test_a_request_without_a_lease_is_never_given_up() -> None:
    leases = Leases()
    with leases.cancellations.watch(*KEY):
        assert not leases.at(1_000_000)


def test_a_reader_who_fell_silent_before_the_request_came_here_gets_no_second_lease() -> None:
    leases = Leases()
    leases.watch.alive(KEY)
    assert not leases.at(9)
    with leases.cancellations.watch(*KEY, lease_s=10):
        assert not leases.at(9.9)
        assert leases.at(10)


def test_while_nobody_can_be_heard_nobody_is_gone_and_then_every_lease_begins_anew() -> None:
    leases = Leases()
    with leases.cancellations.watch(*KEY, lease_s=10):
        assert not leases.at(5)
        leases.watch.hear(False)
        assert not leases.at(100)
        leases.watch.hear(True)
        assert not leases.at(109.9)
        assert leases.at(110)


def test_before_anybody_could_be_heard_nobody_is_gone() -> None:
    leases = Leases()
    cancellations = Cancellations(clock=lambda: leases.clock() / 1000)
    with cancellations.watch(*KEY, lease_s=10) as cancelled:
        leases.clock.advance(60_000)
        cancellations.leases.check()
        assert not cancelled.is_set()


def test_a_request_that_left_us_is_not_given_up_here() -> None:
    leases = Leases()
    with leases.cancellations.watch(*KEY, lease_s=10):
        pass
    assert not leases.at(11)


@pytest.mark.parametrize("order", [(5, 10), (10, 5)])
def test_of_two_holders_the_shorter_lease_counts_while_it_is_held(order: tuple[float, float]) -> None:
    leases = Leases()
    with leases.cancellations.watch(*KEY, lease_s=order[0]), leases.cancellations.watch(*KEY, lease_s=order[1]):
        assert not leases.at(4.9)
        assert leases.at(5)
