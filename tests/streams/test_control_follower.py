"""A worker hears what is said about requests, whenever it starts and whatever else stands in the topic."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from schemas.control import Control, ControlKind
from schemas.errors import BrokerUnavailableError
from streams.broker import TopicPartition
from streams.cancellations import Cancellations
from streams.clock import now_ms
from streams.control import send_control
from streams.control_follower import ControlFollower
from streams.memory import MemoryBroker
from streams.memory_clients import MemoryReader
from streams.topics import CONTROL, topic_specs
from tests.fakes import FakeClock
from tests.streams.token_fakes import broker_with_topics, until

CHECK_S = 0.001


@asynccontextmanager
async def following(
    broker: MemoryBroker, cancellations: Cancellations, clock_ms: Callable[[], int] = now_ms
) -> AsyncIterator[ControlFollower]:
    async with ControlFollower(broker, cancellations, check_s=CHECK_S, clock_ms=clock_ms) as follower:
        assert await follower.catch_up(5)
        yield follower


async def say(broker: MemoryBroker, kind: ControlKind, request_id: str, tenant: str = "a") -> None:
    await send_control(await broker.producer(), Control(kind=kind, request_id=request_id, tenant=tenant, reason="why"))


async def test_a_cancel_is_known_whether_it_came_before_the_worker_or_after() -> None:
    broker, cancellations = await broker_with_topics(), Cancellations()
    await say(broker, ControlKind.CANCEL, "early")
    async with following(broker, cancellations):
        assert cancellations.is_cancelled("early", "a")
        await say(broker, ControlKind.CANCEL, "late")
        await until(lambda: cancellations.is_cancelled("late", "a"))
        assert not cancellations.is_cancelled("late", "b")
        assert cancellations.reason("late", "a") == "why"
    assert len(asyncio.all_tasks()) == 1


async def test_what_was_said_before_the_longest_deadline_is_not_remembered() -> None:
    clock = FakeClock()
    broker = MemoryBroker(clock)
    await broker.create_topics(topic_specs(4))
    await say(broker, ControlKind.CANCEL, "old")
    clock.advance(60_001)
    await say(broker, ControlKind.CANCEL, "young")
    cancellations = Cancellations(max_age_s=60)
    async with following(broker, cancellations, clock):
        assert cancellations.is_cancelled("young", "a")
        assert not cancellations.is_cancelled("old", "a")
        assert cancellations.statistics()["cancelled"] == 1


async def test_a_cancel_that_comes_now_counts_whatever_its_writers_clock_says() -> None:
    clock = FakeClock()
    broker = MemoryBroker(FakeClock(0))
    await broker.create_topics(topic_specs(4))
    cancellations = Cancellations(max_age_s=60)
    async with following(broker, cancellations, clock):
        await say(broker, ControlKind.CANCEL, "r-1")
        await until(lambda: cancellations.is_cancelled("r-1", "a"))


async def test_what_is_no_saying_is_stepped_over_and_counted() -> None:
    broker, cancellations = await broker_with_topics(), Cancellations()
    for value in (None, b"", b"\xc1\xff", b"x" * 100_000):
        broker.append(CONTROL, value, b"r-1", (), None)
    async with following(broker, cancellations) as follower:
        await say(broker, ControlKind.CANCEL, "r-1")
        await until(lambda: cancellations.is_cancelled("r-1", "a"))
        assert follower.num_skipped == 4


async def test_without_the_topic_a_worker_starts_all_the_same_and_hears_as_soon_as_it_is_there() -> None:
    broker, cancellations = MemoryBroker(), Cancellations()
    async with ControlFollower(broker, cancellations) as follower:
        assert not await follower.catch_up(0.01)
        await broker.create_topics(topic_specs(1))
        await say(broker, ControlKind.CANCEL, "r-1")
        assert await follower.catch_up(5)
        await until(lambda: cancellations.is_cancelled("r-1", "a"))


class DeafReader(MemoryReader):
    """Reads, but while its broker is deaf nobody says where the log ends: so nobody knows whether all was read."""

    async def end_offsets(self) -> Mapping[TopicPartition, int]:
        if isinstance(self._broker, DeafBroker) and self._broker.is_deaf:
            self._broker.num_asked += 1
            raise BrokerUnavailableError("no answer")
        return await super().end_offsets()


class DeafBroker(MemoryBroker):
    """Counts what it is asked while it is deaf."""

    is_deaf = False
    num_asked = 0

    async def reader(self, places: Mapping[TopicPartition, int | None]) -> MemoryReader:
        made = await super().reader(places)
        return DeafReader(self, {place: made.position(place) for place in places})


async def test_a_lease_lapses_only_while_readers_can_surely_be_heard() -> None:
    broker, clock = DeafBroker(), FakeClock(0)
    await broker.create_topics(topic_specs(2))
    cancellations = Cancellations(clock=lambda: clock() / 1000)
    async with following(broker, cancellations):
        with cancellations.watch("r-1", "a", lease_s=10) as cancelled:
            clock.advance(9_000)
            await say(broker, ControlKind.ALIVE, "r-1")
            await until(lambda: cancellations.statistics()["readers"] == 1)
            broker.is_deaf = True
            await until(lambda: not cancellations.leases.is_hearing)
            clock.advance(60_000)
            asked = broker.num_asked
            await until(lambda: broker.num_asked > asked + 2)
            assert not cancelled.is_set()
            broker.is_deaf = False
            await until(lambda: cancellations.leases.is_hearing)
            clock.advance(9_999)
            assert not cancelled.is_set()
            clock.advance(1)
            await until(cancelled.is_set)
    assert cancellations.reason("r-1", "a") == "reader is gone"


async def test_a_reader_is_not_gone_for_the_time_that_the_broker_was_away() -> None:
    broker, clock = await broker_with_topics(), FakeClock(0)
    cancellations = Cancellations(clock=lambda: clock() / 1000)
    async with following(broker, cancellations):
        with cancellations.watch("r-1", "a", lease_s=10) as cancelled:
            await until(lambda: cancellations.leases.is_hearing)
            broker.down = True
            await until(lambda: not cancellations.leases.is_hearing)
            clock.advance(60_000)
            broker.down = False
            await until(lambda: cancellations.leases.is_hearing)
            assert not cancelled.is_set()


async def test_a_worker_that_was_paused_itself_takes_no_reader_for_gone() -> None:
    broker, clock = await broker_with_topics(), FakeClock(0)

    def seconds() -> float:
        return clock() / 1000

    cancellations = Cancellations(clock=seconds)
    leases = cancellations.leases
    async with ControlFollower(broker, cancellations, check_s=CHECK_S, clock=seconds) as follower:
        assert await follower.catch_up(5)
        with cancellations.watch("r-1", "a", lease_s=10) as cancelled:
            await until(lambda: leases.is_hearing)
            clock.advance(60_000)
            await until(lambda: not leases.is_hearing or cancelled.is_set())
            await until(lambda: leases.is_hearing)
            assert not cancelled.is_set()
