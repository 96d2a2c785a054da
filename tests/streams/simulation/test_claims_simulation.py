"""The protocol of claims over every schedule within small bounds, and over random ones far beyond them.

Each rule that it rests on is left out once: the walk must then find a request that is lost, a gap, or a text of nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.streams.simulation.explore import explore, wander
from tests.streams.simulation.model import Bounds, Draws, Rule
from tests.streams.simulation.steps import Step

SMALL = {
    "crash, pause, late repeat": Bounds(num_tokens=1, rebalances=1, losses=1),
    "two pauses": Bounds(rebalances=2, losses=0),
    "three workers, two die": Bounds(num_workers=3, crashes=2, rebalances=1, losses=0),
    "another's tokens": Bounds(draws=Draws.OTHER, rebalances=1, losses=0, expiries=1, failures=1),
    "another model": Bounds(draws=Draws.RESTART, rebalances=1, losses=0, expiries=1),
    "two copies in one partition": Bounds(num_tokens=1, copies=1, rebalances=1, losses=0, draws=Draws.OTHER),
    "two copies in two partitions": Bounds(num_tokens=1, num_partitions=2, copies=1, rebalances=1, losses=0),
}
LARGE = {
    "crash, pause, late repeat": Bounds(rebalances=1, losses=1),
    "three pauses": Bounds(rebalances=3, losses=0),
    "another's tokens": Bounds(draws=Draws.OTHER, rebalances=1, losses=1, expiries=1),
    "another model": Bounds(draws=Draws.RESTART, rebalances=1, losses=1),
    "two copies in two partitions, late repeat": Bounds(
        num_tokens=1, num_partitions=2, copies=1, rebalances=0, losses=1, draws=Draws.OTHER
    ),
    "two copies in two partitions, two crashes": Bounds(
        num_workers=3, num_tokens=1, num_partitions=2, copies=1, crashes=2, rebalances=0, losses=0
    ),
}
HUGE = Bounds(
    num_workers=3,
    num_partitions=2,
    num_tokens=4,
    copies=2,
    crashes=2,
    rebalances=6,
    losses=3,
    expiries=2,
    failures=1,
)


@pytest.mark.parametrize("bounds", SMALL.values(), ids=SMALL)
def test_whatever_happens_a_request_ends_once_without_a_gap_and_is_never_lost(bounds: Bounds) -> None:
    found = explore(bounds)
    assert not found.fault, found
    assert found.num_ends > 100, "the bounds are too small to say anything"


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("bounds", LARGE.values(), ids=LARGE)
def test_the_same_holds_over_many_more_schedules(bounds: Bounds) -> None:
    found = explore(bounds)
    assert not found.fault, found


@pytest.mark.parametrize(
    ("rule", "draws", "fault"),
    [
        (Rule.EPOCH, Draws.SAME, "gap"),
        (Rule.RETAINED, Draws.SAME, "lost"),
        (Rule.CANCELLED, Draws.SAME, "lost"),
        (Rule.SHARED, Draws.SAME, "lost"),
        (Rule.READ_AFTER_CLAIM, Draws.OTHER, "the visible text is that of no run"),
    ],
)
def test_without_one_of_the_rules_a_promise_breaks(rule: Rule, draws: Draws, fault: str) -> None:
    found = explore(Bounds(rebalances=1, draws=draws, without=frozenset({rule})))
    assert found.fault.startswith(fault), found


@given(st.randoms(use_true_random=False), st.sampled_from(Draws))
@settings(max_examples=400, deadline=None)
def test_a_random_schedule_with_many_faults_breaks_no_promise(random: Random, draws: Draws) -> None:
    def choose(steps: Sequence[Step]) -> Step:
        due = [step for step in steps if step.is_due]
        return random.choice(due if random.random() < 0.8 else steps)

    found = wander(replace(HUGE, draws=draws), choose)
    assert not found.fault, found
