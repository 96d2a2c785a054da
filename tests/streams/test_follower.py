"""A view's way through its topic: from the start on, over outages and expiry, never stopped by a record."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schemas.errors import BrokerUnavailableError, ConfigError, DecodeError
from streams.broker import Record
from streams.follower import Start, TopicFollower
from streams.memory import MemoryBroker
from streams.memory_clients import MemoryReader
from streams.topics import ROUTES, topic_specs
from tests.streams.token_fakes import broker_with_topics, until


class Seen:
    """Keeps what it is given; a value of `bad` raises."""

    def __init__(self) -> None:
        self.values: list[bytes | None] = []
        self.live: list[bool] = []

    def __call__(self, record: Record, *, is_live: bool) -> None:
        if record.value == b"bad":
            raise DecodeError("no message")
        if record.value == b"worse":
            raise ZeroDivisionError
        self.values.append(record.value)
        self.live.append(is_live)


def append(broker: MemoryBroker, *values: bytes, partition: int = 0) -> None:
    for value in values:
        broker.append(ROUTES, value, b"k", (), partition)


async def test_everything_is_read_from_the_beginning_and_then_what_comes() -> None:
    broker, seen = await broker_with_topics(2), Seen()
    append(broker, b"1", b"2")
    append(broker, b"3", partition=1)
    async with TopicFollower(broker, ROUTES, seen) as follower:
        assert follower.caught_up.is_set()
        assert sorted(map(bytes, filter(None, seen.values))) == [b"1", b"2", b"3"]
        assert seen.live == [False] * 3
        append(broker, b"4")
        await until(lambda: len(seen.values) == 4)
        assert seen.live[-1]
    assert len(asyncio.all_tasks()) == 1


async def test_from_the_end_only_what_comes_is_read() -> None:
    broker, seen = await broker_with_topics(), Seen()
    append(broker, b"1")
    async with TopicFollower(broker, ROUTES, seen, start=Start.END):
        append(broker, b"2")
        await until(lambda: seen.values == [b"2"])


async def test_after_an_outage_it_goes_on_where_it_stood() -> None:
    broker, seen = await broker_with_topics(), Seen()
    append(broker, b"1")
    async with TopicFollower(broker, ROUTES, seen) as follower:
        broker.down = True
        await until(lambda: not follower.is_reading)
        broker.down = False
        append(broker, b"2")
        await until(lambda: seen.values == [b"1", b"2"])
        assert follower.is_reading


async def test_a_refusal_that_passes_does_not_end_the_following(monkeypatch: pytest.MonkeyPatch) -> None:
    broker, seen, refused = await broker_with_topics(), Seen(), asyncio.Event()

    async def refuse(*_: Any, **__: Any) -> Any:
        refused.set()
        raise ConfigError("poll: Kafka refuses us")

    async with TopicFollower(broker, ROUTES, seen) as follower:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryReader, "poll", refuse)
            await refused.wait()
            await until(lambda: not follower.is_reading)
        append(broker, b"1")
        await until(lambda: seen.values == [b"1"])
        assert follower.is_reading


async def test_a_start_without_a_broker_fails_and_one_in_the_background_waits_for_it() -> None:
    broker, seen = await broker_with_topics(), Seen()
    append(broker, b"1")
    broker.down = True
    follower = TopicFollower(broker, ROUTES, seen)
    with pytest.raises(BrokerUnavailableError):
        await follower.start()
    follower.start_soon()
    broker.down = False
    async with asyncio.timeout(5):
        await follower.caught_up.wait()
    assert seen.values == [b"1"]
    await follower.close()
    await follower.close()


async def test_a_place_that_has_expired_is_left_for_the_first_retained_record() -> None:
    broker, seen = await broker_with_topics(), Seen()
    anew: list[int] = []
    append(broker, b"1")
    async with TopicFollower(broker, ROUTES, seen, on_expired=lambda: anew.append(len(seen.values))) as follower:
        broker.down = True
        await until(lambda: not follower.is_reading)
        append_down(broker, b"2", b"3")
        broker.expire(ROUTES, 0, before=2)
        broker.down = False
        await until(lambda: seen.values == [b"1", b"3"])
    assert anew == [1]


def append_down(broker: MemoryBroker, *values: bytes) -> None:
    """Write while others cannot reach the broker."""
    broker.down = False
    append(broker, *values)
    broker.down = True


async def test_a_record_that_cannot_be_taken_is_counted_and_skipped() -> None:
    broker, seen = await broker_with_topics(), Seen()
    append(broker, b"bad", b"worse", b"3")
    async with TopicFollower(broker, ROUTES, seen) as follower:
        assert seen.values == [b"3"]
        assert follower.num_skipped == 2


async def test_a_topic_that_is_made_later_is_found() -> None:
    broker, seen = MemoryBroker(), Seen()
    follower = TopicFollower(broker, ROUTES, seen)
    with pytest.raises(BrokerUnavailableError, match="no topic"):
        await follower.start()
    follower.start_soon()
    await broker.create_topics(topic_specs(1))
    async with asyncio.timeout(5):
        await follower.caught_up.wait()
    await follower.close()
