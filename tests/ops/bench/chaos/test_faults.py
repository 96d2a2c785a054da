"""A plan follows from its seed, has exactly the kills that were asked for, and leaves out what is switched off."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench.chaos.faults import GROUPS, NUM_KILLS, FaultGroup, FaultKind, plan

ALL = frozenset(FaultGroup)


@given(st.integers(0, 1_000), st.integers(1, 200), st.sets(st.sampled_from(FaultGroup)))
def test_a_plan_has_exactly_the_kills_that_were_asked_for(seed: int, num_kills: int, groups: set[FaultGroup]) -> None:
    drawn = plan(random.Random(seed), num_kills, groups)
    assert sum(NUM_KILLS.get(kind, 0) for kind in drawn) == num_kills
    allowed = {kind for group in groups | {FaultGroup.KILLS} for kind in GROUPS[group]}
    assert set(drawn) <= allowed
    assert allowed - set(NUM_KILLS) <= set(drawn)


def test_a_plan_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    assert plan(random.Random(1), 50, ALL) == plan(random.Random(1), 50, ALL) != plan(random.Random(2), 50, ALL)


@pytest.mark.parametrize("num_kills", [6, 20])
def test_a_short_plan_has_every_kind_of_fault(num_kills: int) -> None:
    assert set(plan(random.Random(3), num_kills, ALL)) == set(FaultKind)


def test_every_fault_belongs_to_one_group() -> None:
    grouped = [kind for kinds in GROUPS.values() for kind in kinds]
    assert sorted(grouped) == sorted(FaultKind)
