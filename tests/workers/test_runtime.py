"""The worker process: what it says of itself, and how it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from schemas.errors import BrokerUnavailableError, ConfigError, EngineUnavailableError
from schemas.worker import Pool, WorkerState, WorkerStatus
from streams.broker import TopicPartition
from streams.consumer import PoolConsumer
from streams.delivery import Delivery
from streams.directory import Directory, Heartbeat
from streams.memory import MemoryBroker
from streams.settings import ConsumerLimits
from streams.topics import WORKERS, pool_group, pool_topic, topic_specs
from workers.outbox import Outbox
from workers.runtime import Worker
from workers.serving import DrainLimits
from workers.stage import StageSnapshot
from workers.suspension import OutlierLimits

TOPIC, GROUP = pool_topic(Pool.INTENT, "blue"), pool_group(Pool.INTENT, "blue")
P0 = TopicPartition(TOPIC, 0)
LIMITS = ConsumerLimits(batch_size=1, max_wait_ms=0, commit_interval_ms=5, poll_timeout_ms=20)


@dataclass
class Gate:
    """A handler whose work lasts until it is let go."""

    is_open: asyncio.Event = field(default_factory=asyncio.Event)
    taken: list[Delivery] = field(default_factory=list)
    cancelled: list[Delivery] = field(default_factory=list)
    failure: Exception | None = None
    pool: Pool = Pool.INTENT

    async def start(self) -> None:
        return None

    async def handle(self, batch: Sequence[Delivery]) -> None:
        self.taken.extend(batch)
        if self.failure is not None:
            raise self.failure
        try:
            await self.is_open.wait()
        except asyncio.CancelledError:
            self.cancelled.extend(batch)
            raise
        for delivery in batch:
            delivery.done()

    def snapshot(self) -> StageSnapshot:
        return StageSnapshot(model="m", tokens_in_flight=3, tokens_queued=5, step_ms=1.5)

    async def probe(self) -> float | None:
        return None

    async def stop(self) -> None:
        return None


@dataclass
class Running:
    broker: MemoryBroker
    handler: Gate
    worker: Worker
    stop: asyncio.Event
    task: asyncio.Task[None]
    directory: Directory

    async def produce(self, count: int) -> None:
        producer = await self.broker.producer()
        for number in range(count):
            await producer.send(TOPIC, b"%d" % number, partition=0)

    async def until(self, is_true: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not is_true():
                await self.broker.wait(0.005)


@asynccontextmanager
async def running(
    *, has_peer: bool = False, drain_s: float = 5.0, grace_s: float = 0.2, outliers: OutlierLimits | None = None
) -> AsyncIterator[Running]:
    """A worker of a pool with one partition; the peer only says that it is ready."""
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(1))
    handler, stop = Gate(), asyncio.Event()
    outbox = Outbox(await broker.producer(), worker_id="w", num_token_partitions=1)
    directory = Directory(broker)
    worker = Worker(
        broker,
        handler,
        outbox,
        worker_id="w",
        colour="blue",
        limits=LIMITS,
        heartbeat_s=0.05,
        drain_s=drain_s,
        grace_s=grace_s,
        directory=directory,
        outliers=outliers,
    )
    peer = WorkerStatus(worker_id="p", pool=Pool.INTENT, colour="blue", state=WorkerState.READY, updated_ms=1)
    task = asyncio.create_task(worker.run(stop))
    made = Running(broker, handler, worker, stop, task, directory)
    try:
        async with Heartbeat(outbox.producer, lambda: peer, interval_s=0.05) if has_peer else _nobody():
            await made.until(lambda: worker.ready.is_set() and len(directory.workers()) == 1 + has_peer)
            yield made
            stop.set()
            handler.is_open.set()
            await asyncio.wait((task,), timeout=10)
    finally:
        broker.down = False
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def _nobody() -> AsyncIterator[None]:
    yield


async def test_the_status_tells_partitions_times_and_failures() -> None:
    async with running() as made:
        await made.produce(2)
        await made.until(lambda: len(made.handler.taken) == 2)
        made.handler.taken[0].fail()
        made.handler.is_open.set()
        await made.until(lambda: made.broker.committed(GROUP, P0) == 2)
        status = made.worker.status()
        assert (status.partitions, status.num_partitions, status.num_handled) == ((0,), 1, 2)
        assert status.request_ms > 0
        assert 0 < status.error_rate < 1
        assert (status.tokens_in_flight, status.tokens_queued, status.model) == (3, 5, "m")


async def test_draining_is_announced_at_once_and_work_is_finished() -> None:
    async with running() as made:
        await made.produce(1)
        await made.until(lambda: len(made.handler.taken) == 1)
        made.stop.set()
        await made.until(lambda: not made.directory.workers())
        assert made.worker.state is WorkerState.DRAINING
        assert not made.task.done()
        made.handler.is_open.set()
        await made.task
        assert made.broker.committed(GROUP, P0) == 1
        assert made.broker.records(WORKERS)[-1].value is None, "its tombstone"


async def test_with_peers_what_still_comes_is_served_for_a_while() -> None:
    async with running(has_peer=True, grace_s=5) as made:
        made.handler.is_open.set()
        made.stop.set()
        await made.until(lambda: made.worker.state is WorkerState.DRAINING)
        await made.produce(3)
        await made.task
        assert made.broker.committed(GROUP, P0) == 3


async def test_without_peers_nothing_more_is_taken_and_the_end_is_quick() -> None:
    async with running(grace_s=3_600, drain_s=3_600) as made:
        made.handler.is_open.set()
        made.stop.set()
        async with asyncio.timeout(10):
            await made.task


async def test_with_peers_long_work_is_handed_over_as_soon_as_somebody_waits_behind_it() -> None:
    async with running(has_peer=True, grace_s=0.05, drain_s=60) as made:
        await made.produce(1)
        await made.until(lambda: len(made.handler.taken) == 1)
        made.stop.set()
        await made.until(lambda: made.worker.state is WorkerState.DRAINING)
        await asyncio.sleep(0.3)
        assert not made.task.done(), "nobody waits"
        await made.produce(1)
        await made.task
        assert [delivery.record.offset for delivery in made.handler.cancelled] == [0]
        assert made.broker.committed(GROUP, P0) is None


async def test_what_does_not_finish_in_time_is_left_to_the_next_owner() -> None:
    async with running(drain_s=0.1) as made:
        await made.produce(2)
        await made.until(lambda: len(made.handler.taken) == 2)
        made.stop.set()
        await made.task
        assert len(made.handler.cancelled) == 2
        assert made.broker.committed(GROUP, P0) is None


@pytest.mark.parametrize("has_peer", [False, True])
async def test_a_broker_that_is_away_at_the_stop_does_not_hold_it_up(has_peer: bool) -> None:
    async with running(has_peer=has_peer, drain_s=0.3, grace_s=0.1) as made:
        await made.produce(1)
        await made.until(lambda: len(made.handler.taken) == 1)
        made.broker.down = True
        made.stop.set()
        async with asyncio.timeout(10):
            await made.task


async def test_a_fault_that_no_record_is_to_blame_for_ends_the_worker_and_leaves_the_record() -> None:
    async with running() as made:
        made.handler.failure = EngineUnavailableError("dead")
        await made.produce(1)
        with pytest.raises(EngineUnavailableError):
            await made.task
        assert made.broker.committed(GROUP, P0) is None


async def test_a_stop_while_the_broker_is_away_and_the_group_cannot_be_joined_ends_the_worker() -> None:
    refused = asyncio.Event()

    class Away(MemoryBroker):
        async def group_consumer(self, *_: Any, **__: Any) -> Any:
            refused.set()
            raise BrokerUnavailableError("away")

    broker, stop = Away(), asyncio.Event()
    await broker.create_topics(topic_specs(1))
    outbox = Outbox(await broker.producer(), worker_id="w", num_token_partitions=1)
    worker = Worker(broker, Gate(), outbox, worker_id="w", colour="blue", limits=LIMITS, heartbeat_s=0.05)
    task = asyncio.create_task(worker.run(stop))
    await refused.wait()
    stop.set()
    async with asyncio.timeout(5):
        await task
    assert not worker.ready.is_set()


async def test_a_fault_in_following_the_group_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    async def fault(_: PoolConsumer) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(PoolConsumer, "check_group", fault)
    async with running(has_peer=True) as made:
        gone = WorkerStatus(
            worker_id="p2", pool=Pool.INTENT, colour="blue", state=WorkerState.READY, updated_ms=1, partitions=(1,)
        )
        async with Heartbeat(await made.broker.producer(), lambda: gone, interval_s=0.05):
            await made.until(lambda: len(made.directory.workers()) == 3)
        with pytest.raises(RuntimeError, match="a fault of ours"):
            async with asyncio.timeout(5):
                await made.task


@pytest.mark.parametrize(("drain_s", "grace_s", "named"), [(0.0, 1.0, "drain_s"), (1.0, -1.0, "grace_s")])
def test_a_limit_out_of_range_is_named(drain_s: float, grace_s: float, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        DrainLimits(drain_s=drain_s, grace_s=grace_s)
