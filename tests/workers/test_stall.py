"""An engine that hangs is seen from outside: the worker says that it has failed, and the health check repeats it."""

from __future__ import annotations

import asyncio

from ops.healthcheck import _parser, judge
from schemas.worker import Pool, WorkerState
from streams.memory import MemoryBroker
from streams.settings import ConsumerLimits
from streams.topics import topic_specs
from tests.workers.test_runtime import Gate
from workers.outbox import Outbox
from workers.runtime import Worker
from workers.stage import StageSnapshot
from workers.stall import StallWatch

IDLE = StageSnapshot(last_step_ms=7)


def busy(last_step_ms: int) -> StageSnapshot:
    return StageSnapshot(tokens_in_flight=3, last_step_ms=last_step_ms)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_work_that_waits_without_a_step_is_a_stall_after_the_limit() -> None:
    clock = Clock()
    watch = StallWatch(30, clock)
    assert not watch.is_stalled(busy(7))
    clock.now += 29
    assert not watch.is_stalled(busy(7))
    clock.now += 1
    assert watch.is_stalled(busy(7))


def test_work_that_waits_for_its_first_step_counts_too() -> None:
    clock = Clock()
    watch = StallWatch(30, clock)
    owing = StageSnapshot(owes_step=True, num_queued=1)
    assert not watch.is_stalled(owing)
    clock.now += 30
    assert watch.is_stalled(owing)


def test_a_queue_of_others_is_no_stall() -> None:
    """A router's waiting room is full while the pool behind it works."""
    clock = Clock()
    watch = StallWatch(30, clock)
    watch.is_stalled(StageSnapshot(num_queued=5))
    clock.now += 30
    assert not watch.is_stalled(StageSnapshot(num_queued=5))


def test_a_step_and_idle_time_begin_the_wait_anew() -> None:
    clock = Clock()
    watch = StallWatch(30, clock)
    watch.is_stalled(busy(7))
    clock.now += 29
    assert not watch.is_stalled(busy(8)), "it has made a step"
    clock.now += 29
    assert not watch.is_stalled(IDLE)
    clock.now += 3_600
    assert not watch.is_stalled(busy(8)), "the work has only just come"


async def test_a_worker_whose_engine_stalls_says_that_it_has_failed() -> None:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(1))
    outbox = Outbox(await broker.producer(), worker_id="w", num_token_partitions=1)
    limits = ConsumerLimits(batch_size=1, stuck_ms=1_000)
    worker = Worker(broker, Gate(pool=Pool.GENERATION), outbox, worker_id="w", colour="blue", limits=limits)
    clock = Clock()
    worker._stall = StallWatch(30, clock)
    stop = asyncio.Event()
    task = asyncio.create_task(worker.run(stop))
    async with asyncio.timeout(10):
        await worker.ready.wait()
        assert worker.status().state is WorkerState.READY
        clock.now += 30
        status = worker.status()
        stop.set()
        await task
    assert status.state is WorkerState.FAILED
    health = judge("kafka:9092", _parser().parse_args(["--pool", "generation"]), [status], ())
    assert not health.is_healthy
    assert "no step of the engine" in health.why
