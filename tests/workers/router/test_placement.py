"""Where requests go: keys for sessions, turns, the least expected time, and a slow replica among equal ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.percentile import nearest_rank
from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.request import GenerationRequest, Message, Role
from schemas.worker import Pool, RouteStamp, WorkerState, WorkerStatus
from streams.memory import MemoryBroker
from streams.topics import topic_specs
from tests.streams.token_fakes import until
from tests.workers.router.pool_simulation import Load, Seen, Simulation
from workers.placement import Placement
from workers.router.backlog import Backlog
from workers.router.cost import estimate_tokens
from workers.router.placement import LeastLoad, PartitionCounts, RoundRobin

TOPIC = "gea.generation.blue"
EQUAL, ONE_SLOW = (1.0, 1.0, 1.0, 1.0), (1.0, 1.0, 1.0, 4.0)


def routed(session_id: str | None = None, colour: str = "blue", max_tokens: int = 100) -> RoutedRequest:
    return RoutedRequest(
        request_id="r-1",
        request=GenerationRequest(prompt="hello", session_id=session_id, max_tokens=max_tokens),
        reply=Reply(topic="gea.tokens", partition=0),
        origin=Origin(partition=0, offset=0),
        seed=1,
        received_ms=0,
        deadline_ms=0,
        route=RouteStamp(generation=colour),
    )


def status(name: str, *partitions: int, state: WorkerState = WorkerState.READY, **numbers: Any) -> WorkerStatus:
    numbers.setdefault("updated_ms", 1_000)
    return WorkerStatus(
        worker_id=name, pool=Pool.GENERATION, colour="blue", state=state, partitions=partitions, **numbers
    )


def seen(*statuses: WorkerStatus) -> Seen:
    made = Seen()
    made.statuses = {each.worker_id: each for each in statuses}
    return made


def least_load(workers: Seen, count: int | None = 4, clock: Callable[[], float] = lambda: 0.0) -> LeastLoad:
    return LeastLoad(workers, lambda topic: count, max_length=512, clock=clock)


def round_robin(workers: Seen, count: int | None = 4) -> RoundRobin:
    return RoundRobin(workers, lambda topic: count)


def chosen(placement: Placement, num_requests: int, topic: str = TOPIC) -> list[int | None]:
    return [placement.partition(topic, routed()) for _ in range(num_requests)]


@pytest.mark.parametrize("make", [least_load, round_robin])
def test_a_turn_of_a_session_keeps_its_key_whatever_its_owner_does(make: Callable[[Seen], Placement]) -> None:
    draining = status("a", 0, 1, 2, 3, state=WorkerState.DRAINING)
    assert make(seen(draining, status("b"))).partition(TOPIC, routed("s-1")) is None


@pytest.mark.parametrize("make", [least_load, round_robin])
def test_all_partitions_take_turns_while_no_worker_is_known(make: Callable[[Seen], Placement]) -> None:
    assert chosen(make(seen()), 8) == [0, 1, 2, 3, 0, 1, 2, 3]
    assert chosen(make(seen(status("a"))), 4) == [0, 1, 2, 3]  # it has not said what it owns


@pytest.mark.parametrize("make", [least_load, round_robin])
def test_the_key_decides_while_the_topic_is_unknown(make: Callable[[Seen, int | None], Placement]) -> None:
    assert make(seen(status("a", 0)), None).partition(TOPIC, routed()) is None


@pytest.mark.parametrize("make", [least_load, round_robin])
@pytest.mark.parametrize("state", [WorkerState.DRAINING, WorkerState.SUSPENDED, WorkerState.FAILED])
def test_partitions_of_a_worker_that_takes_no_more_are_avoided(
    make: Callable[[Seen], Placement], state: WorkerState
) -> None:
    placement = make(seen(status("a", 0, 1, state=state), status("b", 2, 3)))
    assert set(chosen(placement, 8)) == {2, 3}
    alone = make(seen(status("a", 0, 1, 2, 3, state=state)))
    assert set(chosen(alone, 8)) == {0, 1, 2, 3}


def test_the_newest_status_says_who_owns_a_partition() -> None:
    old, new = status("a", 0, 1, updated_ms=1), status("b", 1, updated_ms=2, requests_in_flight=9)
    assert set(chosen(least_load(seen(old, new)), 4)) == {0}


def test_a_partition_that_the_topic_does_not_have_is_never_chosen() -> None:
    assert set(chosen(least_load(seen(status("a", -1, 0, 7)), count=2), 6)) == {0}


def test_workers_of_another_colour_or_pool_do_not_count() -> None:
    placement = least_load(seen(status("a", 0, requests_in_flight=5), status("b", 1)))
    assert placement.partition("gea.generation.green", routed(colour="green")) == 0  # nobody known there: in turn
    assert placement.partition(TOPIC, routed()) == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"requests_in_flight": 3}, {"requests_in_flight": 0}),
        ({"lag": 5}, {"lag": 1}),
        ({"tokens_queued": 900}, {"requests_in_flight": 1, "tokens_queued": 100}),
        ({"request_ms": 400, "requests_in_flight": 1}, {"request_ms": 100, "requests_in_flight": 1}),
    ],
)
def test_the_worker_with_less_to_wait_for_is_chosen(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert chosen(least_load(seen(status("a", 0, **first), status("b", 1, **second))), 1) == [1]


def test_what_was_sent_counts_until_a_newer_status_comes() -> None:
    now = [0.0]
    workers = seen(status("a", 0), status("b", 1, requests_in_flight=2))
    placement = least_load(workers, clock=lambda: now[0])
    assert Counter(chosen(placement, 6))[0] == 4  # two more, then in turn
    now[0] = 1.0
    workers.statuses["a"] = status("a", 0, updated_ms=2_000)
    workers.statuses["b"] = status("b", 1, updated_ms=2_000, requests_in_flight=8)
    assert chosen(placement, 5) == [0] * 5


def test_a_status_that_came_right_after_a_request_was_sent_does_not_hide_it() -> None:
    now = [0.0]
    backlog = Backlog()
    backlog.take(status("a", 0), now[0], 1.0)
    backlog.send(1.0, 1.0, 1.0)
    backlog.take(status("a", 0, updated_ms=2_000), 1.01, 1.0)
    assert backlog.work(1.01, 1.0) == pytest.approx(1.0)
    backlog.take(status("a", 0, updated_ms=3_000), 2.0, 1.0)
    assert backlog.work(2.0, 1.0) == 0.0


def test_what_is_finished_but_not_committed_waits_for_nobody() -> None:
    backlog = Backlog()
    backlog.take(status("a", 0, num_handled=10), 0.0, 1.0)
    backlog.take(status("a", 0, num_handled=110, lag=103, requests_in_flight=3, updated_ms=2_000), 1.0, 1.0)
    assert backlog.work(1.0, 1.0) == 3.0


def test_a_pace_that_nothing_confirms_fades_to_that_of_the_pool() -> None:
    backlog = Backlog()
    backlog.take(status("a", 0, request_ms=4_000), 0.0, 1.0)
    assert backlog.trusted_pace_s(0.0, 1.0) == 4.0
    assert backlog.trusted_pace_s(60.0, 1.0) == pytest.approx(1.0, abs=0.1)


def test_a_worker_that_began_anew_is_measured_anew() -> None:
    backlog = Backlog()
    backlog.take(status("a", 0, request_ms=4_000, num_handled=50), 0.0, 1.0)
    backlog.take(status("a", 0, request_ms=0, num_handled=1, started_ms=5, updated_ms=2_000), 1.0, 1.0)
    assert backlog.pace_s is None


@given(
    st.lists(
        st.tuples(st.sampled_from(list(WorkerState)), st.sets(st.integers(0, 9)), st.integers(0, 500)), max_size=5
    ),
    st.integers(1, 8),
)
def test_a_partition_of_the_topic_is_chosen_and_a_ready_owner_where_there_is_one(
    workers: list[tuple[WorkerState, set[int], int]], count: int
) -> None:
    statuses = [
        status(f"w-{n}", *sorted(owned), state=state, requests_in_flight=load, updated_ms=n + 1)
        for n, (state, owned, load) in enumerate(workers)
    ]
    owner = {p: s for s in statuses for p in s.partitions if p < count}
    ready = {p for p, s in owner.items() if s.state is WorkerState.READY}
    for partition in chosen(least_load(seen(*statuses), count), 5):
        assert partition in (ready or set(range(count)))


async def test_a_partition_count_is_asked_for_in_the_background() -> None:
    broker = MemoryBroker()
    counts = PartitionCounts(broker)
    assert counts.get(TOPIC) is None
    await broker.create_topics(topic_specs(3))
    await until(lambda: counts.get(TOPIC) == 3)
    await counts.close()


def test_the_estimate_of_tokens_counts_prompt_passages_and_every_choice() -> None:
    request = GenerationRequest(
        messages=(Message(role=Role.USER, content="x" * 300),), system="y" * 30, max_tokens=50, n=2
    )
    assert estimate_tokens(request, max_length=512) == 110 + 100
    assert estimate_tokens(GenerationRequest(prompt="你好"), max_length=512) == 2 + 512


def p99(slowness: tuple[float, ...], make: Callable[[Seen, Callable[[], float]], Placement], work_s: float) -> float:
    load = Load(slowness=slowness, slots=8, utilisation=0.65, mean_work_s=work_s, num_requests=6_000)
    return nearest_rank(Simulation(load, make).run(), 0.99)


def by_least_load(workers: Seen, clock: Callable[[], float]) -> Placement:
    return least_load(workers, 16, clock)


def by_turns(workers: Seen, clock: Callable[[], float]) -> Placement:
    return round_robin(workers, 16)


def test_a_replica_four_times_slower_raises_p99_by_less_than_half_under_least_load() -> None:
    """Eight requests at once on each of four workers, statuses once a second, 65 % of what four fast ones can do."""
    equal, slow = p99(EQUAL, by_least_load, 1.0), p99(ONE_SLOW, by_least_load, 1.0)
    in_turn = p99(ONE_SLOW, by_turns, 1.0)
    assert slow < 1.5 * equal, f"{slow:.2f} s against {equal:.2f} s"
    assert in_turn > 10 * slow, f"{in_turn:.2f} s in turn"


def test_statuses_older_than_the_work_do_not_herd_requests() -> None:
    """Work of 50 ms, statuses once a second: equal workers are shared as well as by turns."""
    load = Load(slowness=EQUAL, slots=8, utilisation=0.65, mean_work_s=0.05, num_requests=15_000)
    ours, in_turn = (nearest_rank(Simulation(load, make).run(), 0.99) for make in (by_least_load, by_turns))
    assert ours < 1.2 * in_turn, f"{ours * 1000:.0f} ms against {in_turn * 1000:.0f} ms in turn"
