"""How much is on its way to the generation pool, and how fast it goes."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.worker import Pool, WorkerState, WorkerStatus
from tests.workers.router.pool_simulation import Seen
from workers.router.room import Room

LIMIT = 1_000


class Stage:
    """A room with a clock and statuses that a test sets."""

    def __init__(self, *, max_queue_depth: int = 5) -> None:
        self.now_s = 100.0
        self.seen = Seen()
        self.room = Room(
            self.seen, max_tokens_per_worker=LIMIT, max_queue_depth=max_queue_depth, clock=lambda: self.now_s
        )

    def report(self, name: str, pool: Pool = Pool.GENERATION, **fields: Any) -> None:
        """A status comes now."""
        fields = {"state": WorkerState.READY, "updated_ms": int(self.now_s * 1000), **fields}
        self.seen.statuses[name] = WorkerStatus(worker_id=name, pool=pool, colour="blue", **fields)

    def fill(self, tokens: int = 100) -> int:
        """Send while there is room; return how many went."""
        num_sent = 0
        while self.room.has_room() and num_sent < 10_000:
            self.room.send(tokens, is_limited=True)
            num_sent += 1
        return num_sent


@pytest.mark.parametrize("state", [None, WorkerState.STARTING, WorkerState.DRAINING])
def test_without_a_ready_worker_as_many_go_on_as_may_be_queued(state: WorkerState | None) -> None:
    stage = Stage()
    if state is not None:
        stage.report("g", state=state)
    assert stage.fill() == 5
    stage.report("g")  # ready
    assert stage.room.has_room()


def test_each_ready_worker_has_its_tokens() -> None:
    stage = Stage()
    stage.report("g-1")
    stage.report("g-2")
    assert stage.fill() == 20


@pytest.mark.parametrize(
    ("pool", "fields", "num_sent"),
    [
        (Pool.GENERATION, {"requests_in_flight": 2, "tokens_in_flight": 150, "tokens_queued": 150}, 7),
        (Pool.GENERATION, {"requests_in_flight": 2}, 8),
        (Pool.GENERATION, {"lag": 3}, 7),
        (Pool.INTENT, {"requests_in_flight": 1, "lag": 3}, 7),
        (Pool.RETRIEVAL, {"requests_in_flight": 2}, 8),
        (Pool.ROUTER, {"requests_in_flight": 50}, 10),
    ],
)
def test_what_the_workers_report_takes_room(pool: Pool, fields: dict[str, int], num_sent: int) -> None:
    stage = Stage()
    stage.report("g")
    stage.room.has_room()
    stage.room.send(100, is_limited=True)  # from now on a request has 100 tokens
    stage.now_s += 1
    stage.report("g")
    stage.report("w" if pool is not Pool.GENERATION else "g", pool, **fields)
    assert stage.fill() == num_sent


def test_what_was_sent_takes_room_until_every_worker_has_reported_since() -> None:
    stage = Stage()
    stage.report("i", Pool.INTENT)
    stage.report("g")
    assert stage.fill() == 10
    stage.now_s += 1
    stage.report("g")
    assert not stage.room.has_room()
    stage.report("i", Pool.INTENT)
    assert stage.fill() == 10


def test_a_request_is_taken_for_answered_after_twice_its_usual_way() -> None:
    stage = Stage()
    stage.report("i", Pool.INTENT, request_ms=20)
    stage.report("g", request_ms=80)
    assert stage.fill() == 10
    stage.now_s += 0.2
    assert not stage.room.has_room()
    stage.now_s += 0.06
    assert stage.fill() == 10


def test_a_request_larger_than_the_room_goes_on_where_there_is_any() -> None:
    stage = Stage()
    stage.report("g")
    assert stage.fill(5 * LIMIT) == 1


def test_the_rate_is_known_after_a_while_of_waiting_and_forgotten_when_nobody_waits() -> None:
    stage = Stage()
    stage.report("g")
    for _ in range(3):
        stage.room.send(500, is_limited=True)
        assert stage.room.tokens_per_s() is None
        stage.now_s += 1
    assert stage.room.tokens_per_s() == 500
    stage.room.send(500, is_limited=False)
    assert stage.room.tokens_per_s() is None
