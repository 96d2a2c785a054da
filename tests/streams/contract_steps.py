"""What the contract of brokers is checked with: topics, records, members and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from uuid import uuid4

import pytest

from streams.broker import Assignment, Broker, GroupConsumer, LogReader, Record, TopicPartition, TopicSpec
from streams.consumer import Delivery, PoolConsumer
from streams.settings import ConsumerLimits

PATIENCE_S = 40.0
QUICK = ConsumerLimits(batch_size=4, max_wait_ms=5, commit_interval_ms=50, poll_timeout_ms=100)


@pytest.fixture
def topic() -> str:
    return f"test-{uuid4().hex[:12]}"


async def create(broker: Broker, topic: str, num_partitions: int = 1, **settings: str) -> list[TopicPartition]:
    configs = tuple((name.replace("_", "."), value) for name, value in settings.items())
    assert await broker.create_topics([TopicSpec(name=topic, num_partitions=num_partitions, settings=configs)])
    return [TopicPartition(topic, number) for number in range(num_partitions)]


async def produce(broker: Broker, topic: str, count: int, *, partition: int | None = 0, start: int = 0) -> list[Record]:
    producer = await broker.producer()
    try:
        return [
            await producer.send(topic, b"%d" % n, key=b"key-%d" % n, partition=partition)
            for n in range(start, start + count)
        ]
    finally:
        await producer.close()


async def read(reader: LogReader | GroupConsumer, count: int, max_records: int = 100) -> list[Record]:
    records: list[Record] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(records) < count:
            records.extend(await reader.poll(timeout_ms=200, max_records=max_records))
    return records


async def eventually(is_true: Callable[[], Awaitable[bool]], step: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await is_true():
            await step()


class Watch:
    """Records the callbacks of one member."""

    def __init__(self) -> None:
        self.revoked: list[frozenset[TopicPartition]] = []
        self.assigned: list[Assignment] = []
        self.commit_at_revoke: Callable[[], Awaitable[bool]] | None = None
        self.results: list[bool] = []

    async def on_revoked(self, places: frozenset[TopicPartition]) -> None:
        self.revoked.append(places)
        if self.commit_at_revoke is not None:
            self.results.append(await self.commit_at_revoke())

    async def on_assigned(self, assignment: Assignment) -> None:
        self.assigned.append(assignment)


async def join(broker: Broker, topic: str, group: str, watch: Watch, member: str = "a") -> GroupConsumer:
    return await broker.group_consumer(
        [topic], group=group, member=member, on_revoked=watch.on_revoked, on_assigned=watch.on_assigned
    )


async def polling(*members: GroupConsumer) -> None:
    """Let every member poll once: a member that does not poll takes no part in a rebalance for ever."""
    await asyncio.gather(*(member.poll(timeout_ms=50, max_records=1) for member in members))


async def handle(pool: PoolConsumer, seen: list[tuple[int, int]]) -> None:
    async for batch in pool.batches():
        for delivery in batch:
            seen.append((delivery.record.partition, delivery.record.offset))
            delivery.done()


async def take(pool: PoolConsumer, count: int) -> Sequence[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(PATIENCE_S):
        async for batch in pool.batches():
            taken.extend(batch)
            if len(taken) >= count:
                return taken
    raise AssertionError("the consumer has ended")


def is_done(task: asyncio.Task[GroupConsumer]) -> Callable[[], Awaitable[bool]]:
    async def answer() -> bool:
        return task.done()

    return answer


def is_past(pool: PoolConsumer, generation: int) -> Callable[[], Awaitable[bool]]:
    async def answer() -> bool:
        return pool.statistics().generation > generation

    return answer


def has(assigned: list[Assignment], count: int) -> Callable[[], Awaitable[bool]]:
    async def answer() -> bool:
        return len(assigned) >= count

    return answer


def has_all(seen: list[tuple[int, int]], count: int) -> Callable[[], Awaitable[bool]]:
    async def answer() -> bool:
        return len(set(seen)) >= count

    return answer
