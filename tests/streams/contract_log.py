"""What every broker must do with topics, for those who write and read them."""

from __future__ import annotations

import asyncio

import pytest

from schemas.errors import InvalidRequestError, StreamExpiredError
from streams.broker import Broker, TopicSpec
from streams.routing import murmur2_partition
from tests.streams.contract_steps import create, produce, read


class LogContract:
    """Topics, producers and readers."""

    async def test_a_record_comes_back_as_it_was_sent(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        producer = await broker.producer()
        headers = (("request_id", b"r1"), ("twice", b"1"), ("twice", b"2"), ("empty", b""))
        sent = await producer.send(topic, b"\x00value\xff", key=b"key", headers=headers)
        tombstone = await producer.send(topic, None, key=b"key")
        await producer.close()
        reader = await broker.reader({place: 0})
        found = await read(reader, 2)
        await reader.close()
        assert found == [sent, tombstone]
        assert found[0].headers == headers
        assert found[1].value is None
        assert abs(found[1].timestamp_ms - found[0].timestamp_ms) < 60_000

    async def test_keys_go_where_murmur2_says(self, broker: Broker, topic: str) -> None:
        await create(broker, topic, 5)
        for record in await produce(broker, topic, 20, partition=None):
            assert record.key is not None
            assert record.partition == murmur2_partition(record.key, 5)

    async def test_order_and_offsets_are_dense_per_partition(self, broker: Broker, topic: str) -> None:
        places = await create(broker, topic, 2)
        for number in (0, 1):
            assert [r.offset for r in await produce(broker, topic, 10, partition=number)] == list(range(10))
        reader = await broker.reader(dict.fromkeys(places, 0))
        found = await read(reader, 20, max_records=3)
        assert all(reader.position(place) == 10 for place in places)
        await reader.close()
        for place in places:
            assert [record.offset for record in found if record.place == place] == list(range(10))

    async def test_sends_at_once_keep_their_order(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        producer = await broker.producer()
        await asyncio.gather(*(producer.send(topic, b"%d" % n, partition=0) for n in range(50)))
        await producer.close()
        reader = await broker.reader({place: 0})
        assert [record.value for record in await read(reader, 50)] == [b"%d" % n for n in range(50)]
        await reader.close()

    async def test_too_large_a_record_is_refused_and_the_next_one_goes_through(
        self, broker: Broker, topic: str
    ) -> None:
        await create(broker, topic)
        producer = await broker.producer()
        with pytest.raises(InvalidRequestError):
            await producer.send(topic, bytes(2_000_000), key=b"large")
        with pytest.raises(InvalidRequestError):
            await producer.send(topic, b"x", partition=7)
        assert (await producer.send(topic, b"x")).offset == 0
        await producer.close()
        await producer.close()

    async def test_a_topic_that_does_not_exist_is_refused_and_not_made(self, broker: Broker, topic: str) -> None:
        producer = await broker.producer()
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match=topic) as refusal:
                await producer.send(topic, b"x", key=b"k")
            assert refusal.value.field == "topic"
        assert await broker.partitions(topic) == 0
        await create(broker, topic)  # it may come later
        await producer.send(topic, b"x", key=b"k")
        await producer.close()

    async def test_topics_are_created_once(self, broker: Broker, topic: str) -> None:
        assert await broker.partitions(topic) == 0
        spec = TopicSpec(name=topic, num_partitions=3)
        assert list(await broker.create_topics([spec])) == [topic]
        assert list(await broker.create_topics([spec])) == []
        assert await broker.partitions(topic) == 3

    async def test_a_reader_from_the_end_sees_only_what_comes_later(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 3)
        reader = await broker.reader({place: None})
        assert reader.position(place) == 3
        await produce(broker, topic, 1, start=3)
        assert [record.offset for record in await read(reader, 1)] == [3]
        assert await reader.end_offsets() == {place: 4}
        assert await reader.begin_offsets() == {place: 0}
        await reader.close()
        await reader.close()

    async def test_a_reader_may_be_closed_at_once(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        for offset in (0, None):
            await (await broker.reader({place: offset})).close()

    async def test_a_reader_can_be_sought_back(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 5)
        reader = await broker.reader({place: 0})
        await read(reader, 5)
        reader.seek(place, 2)
        assert reader.position(place) == 2
        assert [record.offset for record in await read(reader, 3)] == [2, 3, 4]
        await reader.close()

    async def test_a_reader_waits_for_a_record_and_returns_empty_in_time(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        reader = await broker.reader({place: 0})
        assert list(await reader.poll(timeout_ms=20)) == []
        waiting = asyncio.create_task(read(reader, 1))
        await produce(broker, topic, 1)
        assert len(await waiting) == 1
        await reader.close()

    async def test_an_offset_outside_the_log_is_expired(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 1)
        reader = await broker.reader({place: 1_000})
        with pytest.raises(StreamExpiredError):
            await read(reader, 1)
        reader.seek(place, 0)
        assert len(await read(reader, 1)) == 1
        await reader.close()
