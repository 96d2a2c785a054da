"""Who waits at the door, who goes on, who is told to come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from schemas.errors import DeadlineExceededError, RejectedError, RequestCancelledError
from schemas.request import Priority
from schemas.worker import Pool, WorkerState, WorkerStatus
from streams.cancellations import Cancellations
from streams.clock import now_ms
from tests.streams.token_fakes import until
from tests.workers.router.pool_simulation import Seen
from workers.router.fair_queue import WEIGHTS
from workers.router.room import Room
from workers.router.waiting_room import RoomLimits, Ticket, WaitingRoom

LIMIT = 1_000


class Door:
    """A waiting room before a pool whose room a test opens token by token."""

    def __init__(self, limits: RoomLimits) -> None:
        self.now_s = 100.0
        self.seen = Seen()
        self.cancellations = Cancellations()
        self.order: list[str] = []
        self.tasks: list[asyncio.Task[None]] = []
        room = Room(self.seen, max_tokens_per_worker=LIMIT, max_queue_depth=10, clock=lambda: self.now_s)
        self.waiting = WaitingRoom(room, limits=limits, cancellations=self.cancellations)
        self.report(LIMIT)

    def report(self, tokens: int) -> None:
        """The worker says what it has in hand, and whatever was sent is in it."""
        self.now_s += 1
        self.seen.statuses["g"] = WorkerStatus(
            worker_id="g",
            pool=Pool.GENERATION,
            colour="blue",
            state=WorkerState.READY,
            updated_ms=int(self.now_s * 1000),
            requests_in_flight=1,
            tokens_in_flight=tokens,
        )

    async def free(self, tokens: int) -> None:
        """Make room for that many tokens and let those on that it is for."""
        num_before, num_on = len(self.waiting), len(self.order)
        self.report(LIMIT - tokens)
        await until(lambda: len(self.waiting) < num_before)
        await until(lambda: len(self.order) - num_on == num_before - len(self.waiting))

    def enter(
        self,
        name: str,
        *,
        tenant: str = "calm",
        tokens: int = 100,
        priority: Priority = Priority.NORMAL,
        seconds: float = 60.0,
        is_takeover: bool = False,
    ) -> asyncio.Task[None]:
        ticket = Ticket(
            request_id=name,
            tenant=tenant,
            priority=priority,
            tokens=tokens,
            deadline_ms=now_ms() + int(seconds * 1000),
            is_takeover=is_takeover,
        )
        task = asyncio.create_task(self._enter(ticket))
        self.tasks.append(task)
        return task

    async def _enter(self, ticket: Ticket) -> None:
        await self.waiting.turn(ticket)
        self.order.append(ticket.request_id)


@asynccontextmanager
async def door(max_waiting: int = 100, tenant_share: float = 0.5) -> AsyncIterator[Door]:
    made = Door(RoomLimits(max_waiting=max_waiting, tenant_share=tenant_share))
    made.waiting.start()
    try:
        yield made
    finally:
        for task in made.tasks:
            task.cancel()
        await asyncio.gather(*made.tasks, return_exceptions=True)
        await made.waiting.close()
        await made.waiting.close()
    assert len(made.waiting) == 0
    assert len(asyncio.all_tasks()) == 1


async def filled(made: Door, num: int, tokens: int = 100) -> None:
    num_before = len(made.waiting)
    for number in range(num):
        made.enter(f"flood-{number}", tenant="flood", tokens=tokens)
    await until(lambda: len(made.waiting) == num_before + num)


async def test_a_request_goes_on_at_once_where_there_is_room() -> None:
    async with door() as made:
        made.report(0)
        await made.enter("r-1")
        assert made.order == ["r-1"]


async def test_requests_wait_for_room_and_go_on_in_order() -> None:
    async with door() as made:
        await filled(made, 5, tokens=300)
        await made.free(500)
        assert made.order == ["flood-0", "flood-1"]
        await made.free(1_000)
        assert made.order == [f"flood-{n}" for n in range(5)]


async def test_nobody_overtakes_those_who_wait_when_room_comes() -> None:
    async with door() as made:
        await filled(made, 2)
        made.report(0)
        await made.enter("late")
        assert made.order[-1] == "late"


async def test_one_request_beside_a_flood_of_another_tenant_waits_for_a_turn() -> None:
    async with door() as made:
        await filled(made, 50, tokens=500)
        calm = made.enter("calm", tokens=500)
        await until(lambda: len(made.waiting) == 51)
        while not calm.done():
            await made.free(500)
        assert made.order.index("calm") <= 5


async def test_lanes_share_the_room_by_weight() -> None:
    async with door(max_waiting=1_000) as made:
        for priority in Priority:
            for number in range(60):
                made.enter(f"{priority}-{number}", tenant=f"t-{priority}", priority=priority)
        await until(lambda: len(made.waiting) == 180)
        for _ in range(7):
            await made.free(1_000)
        counts = {priority: sum(name.startswith(priority) for name in made.order) for priority in Priority}
        whole = sum(counts.values())
        for priority, weight in WEIGHTS.items():
            assert abs(counts[priority] / whole - weight / sum(WEIGHTS.values())) < 0.05


async def test_a_full_room_rejects_at_the_door_with_the_time_to_come_back() -> None:
    async with door(max_waiting=3, tenant_share=1.0) as made:
        await filled(made, 3)
        with pytest.raises(RejectedError, match="at most 3") as caught:
            await made.enter("r-4", tenant="flood")
        assert 1 <= caught.value.retry_after_s <= 60
        assert len(made.waiting) == 3


async def test_a_tenant_may_fill_the_room_alone_but_not_beside_others() -> None:
    async with door(max_waiting=10) as made:
        await filled(made, 8)
        made.enter("calm")
        await until(lambda: len(made.waiting) == 9)
        with pytest.raises(RejectedError, match="of the tenant"):
            await made.enter("more", tenant="flood")


async def test_a_newcomer_takes_a_place_from_the_tenant_that_holds_the_most() -> None:
    async with door(max_waiting=4) as made:
        await filled(made, 4)
        calm = made.enter("calm")
        await until(lambda: made.tasks[3].done())
        with pytest.raises(RejectedError, match="same tenant"):
            made.tasks[3].result()
        assert len(made.waiting) == 4
        while not calm.done():
            await made.free(100)
        assert made.order.index("calm") <= 3


async def test_a_take_over_is_never_rejected_nor_pushed_out() -> None:
    async with door(max_waiting=2, tenant_share=0.1) as made:
        await filled(made, 2)
        for number in range(3):
            made.enter(f"again-{number}", tenant="flood", is_takeover=True)
        await until(lambda: len(made.waiting) == 5)
        calm = made.enter("calm")
        await until(lambda: made.tasks[1].done())
        assert not calm.done()
        assert not any(task.done() for task in made.tasks[2:5])


async def test_a_cancelled_request_leaves_the_room_at_once() -> None:
    async with door() as made:
        await filled(made, 2)
        waiting = made.enter("r-1")
        await until(lambda: len(made.waiting) == 3)
        made.cancellations.cancel("r-1", "calm", "changed my mind")
        with pytest.raises(RequestCancelledError, match="changed my mind"):
            await waiting
        assert len(made.waiting) == 2
        with pytest.raises(RequestCancelledError):
            await made.enter("r-1")


async def test_a_waiting_request_is_told_at_its_deadline() -> None:
    async with door() as made:
        await filled(made, 1)
        waiting = made.enter("r-1", seconds=0.03)
        with pytest.raises(DeadlineExceededError):
            await waiting
        with pytest.raises(DeadlineExceededError):
            await made.enter("r-2", seconds=-1.0)
        assert len(made.waiting) == 1


async def test_a_request_whose_turn_would_come_after_its_deadline_is_rejected_at_the_door() -> None:
    async with door() as made:
        await filled(made, 30)
        for _ in range(5):
            await made.free(100)
        with pytest.raises(RejectedError, match="after its deadline") as caught:
            await made.enter("late", tenant="flood", seconds=5.0)
        assert caught.value.retry_after_s > 5
        made.enter("in time", tenant="flood", seconds=500.0)
        made.enter("another tenant", seconds=5.0)
        num_waiting = len(made.waiting)
        await until(lambda: len(made.waiting) == num_waiting + 2)


async def test_a_request_whose_partition_is_lost_leaves_the_room() -> None:
    async with door() as made:
        await filled(made, 3)
        made.tasks[1].cancel()
        await until(lambda: len(made.waiting) == 2)
        while len(made.waiting):
            await made.free(100)
        assert made.order == ["flood-0", "flood-2"]
