"""A broker in memory with a mover of retries on it, and a clock that a test steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from schemas.codec import unpack
from schemas.envelope import Headers, RoutedRequest
from schemas.failure import DeadLetter
from schemas.tokens import EndStatus, Epoch
from streams.broker import TopicPartition
from streams.cancellations import Cancellations
from streams.memory import MemoryBroker
from streams.token_reader import decode_token
from streams.topics import DEAD_LETTER, RETRY_SHORT, TOKENS, retry_group, topic_specs
from tests.workers.routed import ROUTED
from workers.failure_policy import Decision, Verdict
from workers.outbox import Outbox
from workers.router.retry_mover import RetryMover

GENERATION = "gea.generation.blue"


class StepClock:
    """A clock that moves only when told, and wakes who waits for it."""

    def __init__(self) -> None:
        self._now_ms = 1_700_000_000_000
        self._moved = asyncio.Event()
        self.has_waiter = asyncio.Event()

    def now_ms(self) -> int:
        return self._now_ms

    def step(self, ms: int) -> None:
        self._now_ms += ms
        self._moved.set()
        self._moved = asyncio.Event()

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        assert timeout_s > 0
        self.has_waiter.set()
        self.has_waiter = asyncio.Event()
        waits = [asyncio.create_task(event.wait()), asyncio.create_task(self._moved.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waits:
                task.cancel()


class Post:
    """A broker with a mover on it, and what a test puts in and looks for."""

    def __init__(self, broker: MemoryBroker, outbox: Outbox) -> None:
        self.broker = broker
        self.outbox = outbox
        self.clock = StepClock()
        self.cancellations = Cancellations(clock=lambda: self.clock.now_ms() / 1000)

    def mover(self, member: str = "router-1", max_in_flight: int = 100) -> RetryMover:
        return RetryMover(
            self.broker,
            self.outbox,
            member=member,
            max_in_flight=max_in_flight,
            cancellations=self.cancellations,
            clock=self.clock,
            commit_interval_ms=1,
        )

    async def retry(self, request_id: str, delay_ms: int, topic: str = RETRY_SHORT, **changes: object) -> None:
        routed = msgspec.structs.replace(ROUTED, request_id=request_id, **changes)
        due_ms = self.clock.now_ms() + delay_ms
        await self.outbox.retry(routed, Decision(verdict=Verdict.RETRY, topic=topic, not_before_ms=due_ms), GENERATION)

    async def raw(self, value: bytes | None, headers: Headers, key: bytes = b"k") -> None:
        await self.outbox.producer.send(RETRY_SHORT, value, key=key, headers=headers)

    def returned(self) -> list[str]:
        records = self.broker.records(GENERATION)
        return sorted(unpack(record.value, RoutedRequest).request_id for record in records)

    async def until_returned(self, *request_ids: str) -> None:
        async with asyncio.timeout(5):
            await self.broker.until(lambda: self.returned() == sorted(request_ids))

    async def until_waiting(self, mover: RetryMover, count: int) -> None:
        async with asyncio.timeout(5):
            while mover.num_waiting != count:
                await self.clock.has_waiter.wait()

    async def until_committed(self, topic: str = RETRY_SHORT) -> None:
        places = [TopicPartition(topic, number) for number in range(2)]
        async with asyncio.timeout(5):
            await self.broker.until(
                lambda: all(
                    (self.broker.committed(retry_group(topic), place) or 0) == self.broker.log(place).end
                    for place in places
                )
            )

    def letters(self) -> list[DeadLetter]:
        return [unpack(record.value, DeadLetter) for record in self.broker.records(DEAD_LETTER)]

    def ends(self, request_id: str) -> list[tuple[EndStatus, str, Epoch]]:
        tokens = [decode_token(r) for r in self.broker.records(TOKENS) if r.key == request_id.encode()]
        return [(t.end.status, t.end.failure.code if t.end.failure else "", t.epoch) for t in tokens if t.end]


@asynccontextmanager
async def post() -> AsyncIterator[Post]:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(2))
    yield Post(broker, Outbox(await broker.producer(), worker_id="router-1", num_token_partitions=2))


@asynccontextmanager
async def running(mover: RetryMover) -> AsyncIterator[RetryMover]:
    await mover.start()
    try:
        yield mover
    finally:
        await mover.stop()
