"""A steady stream of records and workers that count them: what group tests on a real broker share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, Self

from streams.broker import Producer, TopicPartition
from streams.consumer import Delivery, PoolConsumer
from streams.kafka import KafkaBroker
from streams.settings import ConsumerLimits

PATIENCE_S = 40.0
LIMITS = ConsumerLimits(batch_size=4, max_wait_ms=1, commit_interval_ms=50, poll_timeout_ms=100, stuck_ms=20_000)


class Worker:
    """A consumer and its work: `work` is awaited for each delivery, which is then acknowledged."""

    def __init__(
        self,
        broker: KafkaBroker,
        topic: str,
        name: str,
        *,
        limits: ConsumerLimits = LIMITS,
        work: Callable[[Delivery], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        self.name = name
        self.consumer = PoolConsumer(broker, [topic], group=topic, member=name, limits=limits)
        self.started: Counter[tuple[int, int, int]] = Counter()
        """How often an offset was handed out, by partition, offset and first generation of the ownership."""
        self.done: list[tuple[int, int]] = []
        self.handed_at: list[float] = []
        self._work = work
        self._tasks: set[asyncio.Task[None]] = set()
        self._taking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        await self.consumer.__aenter__()
        self._taking = asyncio.create_task(self._take())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self, drain_s: float = 5.0) -> None:
        await self.consumer.drain(drain_s)
        await self.consumer.close()
        await self._end()

    async def vanish(self) -> None:
        """Be gone as after `kill -9`: nothing is committed, and the group is not told."""
        membership = self.consumer._membership
        assert membership is not None
        member: Any = membership._member
        membership.lose()
        assert self.consumer._supervisor is not None
        self.consumer._supervisor.cancel()
        await asyncio.wait((self.consumer._supervisor,))
        coordinator = member._client._coordinator

        async def say_nothing() -> None:
            coordinator.reset_generation()

        coordinator._maybe_leave_group = say_nothing
        await self.consumer.close()
        await self._end()

    @property
    def partitions(self) -> frozenset[TopicPartition]:
        return self.consumer.statistics().partitions

    async def _take(self) -> None:
        async for batch in self.consumer.batches():
            self.handed_at.append(asyncio.get_running_loop().time())
            for delivery in batch:
                record = delivery.record
                self.started[record.partition, record.offset, delivery.generation] += 1
                if self._work is None:
                    self._finish(delivery)
                    continue
                task = asyncio.create_task(self._handle(delivery))
                delivery.attach(task)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _handle(self, delivery: Delivery) -> None:
        assert self._work is not None
        await self._work(delivery)
        self._finish(delivery)

    def _finish(self, delivery: Delivery) -> None:
        self.done.append((delivery.record.partition, delivery.record.offset))
        delivery.done()

    async def _end(self) -> None:
        for task in (self._taking, *self._tasks):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def stream(producer: Producer, topic: str, num_partitions: int, pause_s: float) -> AsyncIterator[Counter[int]]:
    """Write records to all partitions in turn until the end of the block; gives how many each partition got."""
    written: Counter[int] = Counter()
    is_over = asyncio.Event()

    async def write() -> None:
        number = 0
        while not is_over.is_set():
            partition = number % num_partitions
            await producer.send(topic, b"%d" % number, partition=partition)
            written[partition] += 1
            number += 1
            await asyncio.sleep(pause_s)

    writing = asyncio.create_task(write())
    try:
        yield written
    finally:
        is_over.set()  # not cancelled: a record may be written although its send was cancelled
        await writing


async def until(is_true: Callable[[], bool], timeout_s: float = PATIENCE_S) -> None:
    async with asyncio.timeout(timeout_s):
        while not is_true():  # noqa: ASYNC110 - the state is a server's
            await asyncio.sleep(0.01)
