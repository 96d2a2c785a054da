"""When a worker steps aside and comes back: decisions by table."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import ConfigError
from schemas.worker import Pool, WorkerState, WorkerStatus
from workers.suspension import OutlierLimits, OutlierWatch, ProbePace, has_precedence, may_return, reason_to_suspend

LIMITS = OutlierLimits(factor=3, error_rate=0.2, after_s=10, probe_s=5, max_probe_s=40)
READY, SUSPENDED, DRAINING = WorkerState.READY, WorkerState.SUSPENDED, WorkerState.DRAINING


def worker(name: str, state: WorkerState = READY, **fields: Any) -> WorkerStatus:
    return WorkerStatus(worker_id=name, pool=Pool.GENERATION, colour="blue", state=state, updated_ms=1, **fields)


def steps(*times: float, **own: Any) -> list[WorkerStatus]:
    """Workers a, b, c, … with these step times; `own` are further fields of the first."""
    return [worker("abcdefgh"[n], step_ms=time, **(own if not n else {})) for n, time in enumerate(times)]


@pytest.mark.parametrize(
    ("pool", "expected"),
    [
        (steps(100, 25, 25, 25), True),
        (steps(100, 25, 25), True),
        (steps(100, 25), False),
        (steps(70, 25, 25, 25), False),
        (steps(25, 100, 25, 25), False),
        (steps(5, 1, 1, 1), False),
        (steps(7, 1, 1, 1), True),
        (steps(200, 100, 20, 20, 20), True),
        (steps(100, 200, 20, 20, 20), False),
        ([*steps(100, 25, 25), worker("d", SUSPENDED, step_ms=400)], False),
        ([*steps(100, 25), worker("d", DRAINING, step_ms=25)], False),
        (steps(100, 25, 25, state=SUSPENDED), False),
        ([worker("a", request_ms=900), worker("b", request_ms=200), worker("c", request_ms=210)], True),
        ([worker("a", request_ms=900, step_ms=9), worker("b", request_ms=200), worker("c", request_ms=210)], True),
        ([worker("a", request_ms=900), worker("b"), worker("c", request_ms=210)], False),
        ([worker("a", error_rate=0.5), worker("b"), worker("c", error_rate=0.01)], True),
        ([worker("a", error_rate=0.19), worker("b"), worker("c")], False),
        ([worker("a", error_rate=0.9), worker("b", error_rate=0.9), worker("c", error_rate=0.9)], False),
        ([], False),
    ],
)
def test_only_the_worst_outlier_steps_aside_and_only_where_two_remain(pool: list[WorkerStatus], expected: bool) -> None:
    own = pool[0] if pool else worker("a", step_ms=100)
    assert (reason_to_suspend(own, pool, LIMITS) is not None) is expected


@given(
    st.lists(st.tuples(st.sampled_from([1.0, 20.0, 21.0, 100.0, 500.0]), st.sampled_from([0.0, 0.3, 1.0])), max_size=8)
)
def test_at_most_one_worker_of_a_pool_decides_to_go(measures: list[tuple[float, float]]) -> None:
    pool = [worker("abcdefgh"[n], step_ms=step, error_rate=rate) for n, (step, rate) in enumerate(measures)]
    assert sum(reason_to_suspend(own, pool, LIMITS) is not None for own in pool) <= 1


def test_of_two_that_went_at_the_same_moment_one_stays_out() -> None:
    pool = [worker("a", SUSPENDED), worker("b", SUSPENDED), worker("c")]
    assert [has_precedence(name, pool) for name in "ab"] == [True, False]


@pytest.mark.parametrize(
    ("probe_ms", "peers", "expected"),
    [
        (25, steps(25, 25, 25), True),
        (75, steps(25, 25, 25), True),
        (80, steps(25, 25, 25), False),
        (4, steps(1, 1, 1), True),
        (None, steps(25, 25, 25), True),
        (500, steps(25), True),
        (500, [], True),
        (500, [*steps(25), worker("d", DRAINING, step_ms=25)], True),
        (500, [worker("b", request_ms=20), worker("c", request_ms=20)], True),
    ],
)
def test_a_probe_within_the_factor_or_a_pool_in_need_ends_a_suspension(
    probe_ms: float | None, peers: list[WorkerStatus], expected: bool
) -> None:
    assert may_return(probe_ms, peers, LIMITS) is expected


def test_an_outlier_must_last_and_go_on_working_to_count() -> None:
    watch = OutlierWatch(LIMITS)
    pool = steps(100, 25, 25)
    assert watch.note(pool[0], pool, 0) is None
    assert watch.note(pool[0], pool, 11) is None, "no new work since"
    working = steps(100, 25, 25, num_handled=3)
    assert watch.note(working[0], working, 9.9) is None
    assert watch.note(working[0], working, 10) == "step_ms 100, usual 25"
    fine = steps(25, 25, 25)
    assert watch.note(fine[0], fine, 11) is None
    assert watch.note(working[0], working, 12) is None, "it begins anew"


def test_probes_come_less_often_while_they_fail_and_after_a_return_that_did_not_last() -> None:
    pace = ProbePace(LIMITS)
    pace.suspend(0)
    assert [pace.next_delay_s() for _ in range(5)] == [5, 10, 20, 40, 40]
    pace.come_back(100)
    pace.suspend(120)
    assert pace.next_delay_s() == 40
    pace.come_back(200)
    pace.suspend(240)
    assert pace.next_delay_s() == 5


@pytest.mark.parametrize(
    ("field", "value"),
    [("factor", 1.0), ("error_rate", 0.0), ("after_s", 0.0), ("probe_s", -1.0), ("max_probe_s", 0.0)],
)
def test_a_limit_out_of_range_is_named(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"outlier.{field}"):
        OutlierLimits(**{field: value})
