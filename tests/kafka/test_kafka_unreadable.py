"""A record that aiokafka cannot read: no neighbour is lost, and it stands in its place without a value."""

from __future__ import annotations

import asyncio

import pytest
from aiokafka import AIOKafkaProducer

from streams.broker import GroupConsumer, LogReader, Record, TopicPartition
from streams.kafka import KafkaBroker
from tests.streams.contract_steps import Watch, create, join, read
from tests.streams.contract_steps import topic as topic
from tests.streams.test_kafka_fetch import NAME, poisoned

pytestmark = pytest.mark.kafka
NUM_PARTITIONS = 3


async def write(bootstrap: str, topic: str) -> list[bytes | None]:
    """Write batches of 3 and 2 records to each partition, the third unreadable, and return what is to be read."""
    async with AIOKafkaProducer(bootstrap_servers=bootstrap) as producer:
        for partition in range(NUM_PARTITIONS):
            for numbers in ((0, 1, 2), (3, 4)):
                batch = producer.create_batch()
                for number in numbers:
                    headers = [(NAME, b"1")] if number == 2 else []
                    batch.append(timestamp=None, key=None, value=b"%d" % number, headers=headers)
                batch.close()
                batch._buffer = poisoned(bytes(batch._build()))
                await (await producer.send_batch(batch, topic, partition=partition))
    return [b"0", b"1", None, b"3", b"4"]


def by_partition(records: list[Record]) -> list[list[bytes | None]]:
    return [[record.value for record in records if record.partition == number] for number in range(NUM_PARTITIONS)]


async def check(reader: LogReader | GroupConsumer, expected: list[bytes | None]) -> None:
    records = await read(reader, NUM_PARTITIONS * len(expected))
    assert by_partition(records) == [expected] * NUM_PARTITIONS
    assert [r.offset for r in records if r.partition == 1] == [0, 1, 2, 3, 4]


async def test_a_reader_goes_on_behind_an_unreadable_record(broker: KafkaBroker, bootstrap: str, topic: str) -> None:
    places = await create(broker, topic, NUM_PARTITIONS)
    expected = await write(bootstrap, topic)
    reader = await broker.reader(dict.fromkeys(places, 0))
    await check(reader, expected)
    assert [reader.position(place) for place in places] == [5] * NUM_PARTITIONS
    await reader.close()


async def test_a_member_goes_on_behind_an_unreadable_record(broker: KafkaBroker, bootstrap: str, topic: str) -> None:
    await create(broker, topic, NUM_PARTITIONS)
    expected = await write(bootstrap, topic)
    member = await join(broker, topic, topic, Watch())
    await check(member, expected)
    assert await member.commit({TopicPartition(topic, number): 5 for number in range(NUM_PARTITIONS)})
    await asyncio.shield(member.close())
