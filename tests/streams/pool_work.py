"""A topic of work in memory, and a pool's consumer of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

from streams.broker import Record, TopicPartition, TopicSpec
from streams.consumer import Delivery, PoolConsumer
from streams.memory import MemoryBroker
from streams.settings import ConsumerLimits

TOPIC = "work"
GROUP = "gea-test-blue"
P0 = TopicPartition(TOPIC, 0)
QUICK = ConsumerLimits(batch_size=4, max_wait_ms=0, commit_interval_ms=5, poll_timeout_ms=1000)


async def broker_with(num_partitions: int = 1) -> MemoryBroker:
    broker = MemoryBroker()
    await broker.create_topics([TopicSpec(name=TOPIC, num_partitions=num_partitions)])
    return broker


async def produce(broker: MemoryBroker, count: int, partition: int | None = 0) -> list[Record]:
    producer = await broker.producer()
    return [
        await producer.send(TOPIC, b"%d" % n, key=b"%d" % n if partition is None else None, partition=partition)
        for n in range(count)
    ]


def consumer(broker: MemoryBroker, member: str = "a", limits: ConsumerLimits = QUICK) -> PoolConsumer:
    return PoolConsumer(broker, [TOPIC], group=GROUP, member=member, limits=limits)


async def take(batches: AsyncIterator[Sequence[Delivery]], count: int) -> list[Delivery]:
    taken: list[Delivery] = []
    while len(taken) < count:
        taken.extend(await anext(batches))
    return taken


def offsets(deliveries: Sequence[Delivery]) -> list[int]:
    return [delivery.record.offset for delivery in deliveries]


async def until(broker: MemoryBroker, is_true: Callable[[], bool]) -> None:
    """Wait for what no event of the broker tells of."""
    async with asyncio.timeout(5):
        while not is_true():
            await broker.wait(0.002)
