"""A generation worker that is slower than its peers hands its work over, stands aside, and comes back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from schemas.tokens import EndStatus
from schemas.worker import Pool, WorkerState
from streams.topics import pool_topic, topic_specs
from tests.flow.harness import DIALOGUE, NUM_PARTITIONS, Installation
from workers.generation.engine.fake import FakeEngine
from workers.suspension import OutlierLimits

NAMES = [f"generation-{number}" for number in range(1, 5)]
LIMITS = OutlierLimits(factor=3, after_s=0.2, probe_s=0.2, max_probe_s=0.5)
ANSWER = "Within 30 days, in any shop of ours."
FAST_S, SLOW_S = 0.002, 0.04


class Pace:
    """The time of one engine's step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def pause(self) -> None:
        await asyncio.sleep(self.seconds)


@asynccontextmanager
async def four_workers() -> AsyncIterator[tuple[Installation, dict[str, Pace]]]:
    """A router and four generation workers on eight partitions."""
    made = Installation()
    made.outliers = LIMITS
    wide = pool_topic(Pool.GENERATION, "blue")
    specs = [replace(s, num_partitions=8) if s.name == wide else s for s in topic_specs(NUM_PARTITIONS)]
    await made.broker.create_topics(specs)
    paces = {name: Pace(FAST_S) for name in NAMES}
    try:
        await made.start(Pool.ROUTER, "router-1")
        for name in NAMES:
            await made.start(Pool.GENERATION, name, FakeEngine(ANSWER, pause=paces[name].pause))
        yield made, paces
    finally:
        await made.close()


@asynccontextmanager
async def load(made: Installation, num_at_once: int = 12) -> AsyncIterator[list[str]]:
    """Ask without a break until the end of the block, and check every answer."""
    answered: list[str] = []
    is_over = False
    numbers = itertools.count()

    async def ask_on() -> None:
        while not is_over:
            answer = await client.complete("Hello", request_id=f"r-{next(numbers)}", **DIALOGUE)
            assert answer.end.status is EndStatus.COMPLETED
            assert answer.text == ANSWER
            answered.append(answer.request_id)

    async with made.client() as client, asyncio.TaskGroup() as tasks:
        for _ in range(num_at_once):
            tasks.create_task(ask_on())
        try:
            yield answered
        finally:
            is_over = True
    assert len(set(answered)) == len(answered)


async def until(is_true: Callable[[], bool], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_true():  # noqa: ASYNC110 - workers tell their state to the log only
            await asyncio.sleep(0.01)


async def test_a_slow_worker_stands_aside_and_returns_when_it_is_as_fast_as_the_others() -> None:
    async with four_workers() as (made, paces):
        slow = made.workers[NAMES[1]].worker
        async with load(made) as answered:
            await until(lambda: len(answered) > 30)
            assert [made.workers[name].worker.state for name in NAMES] == [WorkerState.READY] * 4
            paces[NAMES[1]].seconds = SLOW_S
            await until(lambda: slow.state is WorkerState.SUSPENDED and not slow.status().num_partitions)
            assert "step_ms" in slow.status().reason
            num_before, num_handled = len(answered), slow.status().num_handled
            await until(lambda: len(answered) > num_before + 50)
            assert slow.status().num_handled == num_handled, "it takes no work while it is suspended"
            assert slow.state is WorkerState.SUSPENDED, "its probes are slow"
            others = [made.workers[name].worker for name in NAMES if name != NAMES[1]]
            assert {worker.state for worker in others} == {WorkerState.READY}
            assert sum(len(worker.status().partitions) for worker in others) == 8
            paces[NAMES[1]].seconds = FAST_S
            await until(lambda: slow.state is WorkerState.READY and slow.status().num_partitions == 2)
            assert slow.status().reason == ""


async def test_two_slow_workers_do_not_both_go() -> None:
    async with four_workers() as (made, paces), load(made) as answered:
        paces[NAMES[0]].seconds, paces[NAMES[2]].seconds = SLOW_S, 2 * SLOW_S
        worst, other = (made.workers[NAMES[number]].worker for number in (2, 0))
        await until(lambda: worst.state is WorkerState.SUSPENDED and not worst.status().num_partitions)
        num_before = len(answered)
        await until(lambda: len(answered) > num_before + 50)
        assert other.state is WorkerState.READY


async def test_a_suspended_worker_that_is_stopped_ends_at_once() -> None:
    async with four_workers() as (made, paces):
        slow = made.workers[NAMES[1]].worker
        async with load(made):
            paces[NAMES[1]].seconds = SLOW_S
            await until(lambda: slow.state is WorkerState.SUSPENDED and not slow.status().num_partitions)
            async with asyncio.timeout(10):
                await made.stop(NAMES[1])


async def test_a_suspended_worker_returns_when_the_pool_needs_it() -> None:
    async with four_workers() as (made, paces):
        slow = made.workers[NAMES[1]].worker
        async with load(made) as answered:
            paces[NAMES[1]].seconds = SLOW_S
            await until(lambda: slow.state is WorkerState.SUSPENDED and not slow.status().num_partitions)
            for name in (NAMES[0], NAMES[2]):
                await made.stop(name)
            await until(lambda: slow.state is WorkerState.READY and slow.status().num_partitions > 0)
            num_before = len(answered)
            await until(lambda: len(answered) > num_before + 10)
