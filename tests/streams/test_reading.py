"""Reading to an end that was asked for before."""

from __future__ import annotations

import asyncio

from streams.broker import TopicPartition, TopicSpec
from streams.memory import MemoryBroker
from streams.reading import read_until

PLACES = [TopicPartition("t", number) for number in range(2)]


async def filled(num_records: int) -> MemoryBroker:
    broker = MemoryBroker()
    await broker.create_topics([TopicSpec(name="t", num_partitions=len(PLACES))])
    await write(broker, num_records)
    return broker


async def write(broker: MemoryBroker, num_records: int) -> None:
    producer = await broker.producer()
    for number in range(num_records):
        await producer.send("t", b"%d" % number, partition=number % len(PLACES))


async def test_every_partition_is_read_to_its_end_a_page_at_a_time() -> None:
    broker = await filled(7)
    reader = await broker.reader(dict.fromkeys(PLACES, 0))
    pages = [page async for page in read_until(reader, await reader.end_offsets(), timeout_ms=10, max_records=2)]
    assert max(map(len, pages)) == 2
    assert {record.value for page in pages for record in page} == {b"%d" % number for number in range(7)}


async def test_a_topic_that_is_read_already_is_not_polled() -> None:
    broker = await filled(2)
    reader = await broker.reader(dict.fromkeys(PLACES))
    assert [page async for page in read_until(reader, await reader.end_offsets(), timeout_ms=10)] == []


async def test_what_is_written_meanwhile_does_not_move_the_end() -> None:
    broker = await filled(2)
    reader = await broker.reader(dict.fromkeys(PLACES, 0))
    num_pages = 0
    async with asyncio.timeout(5):
        async for _ in read_until(reader, await reader.end_offsets(), timeout_ms=10, max_records=1):
            num_pages += 1
            await write(broker, 2)
    assert 2 <= num_pages <= 4


async def test_polls_that_return_nothing_are_handed_out_so_that_the_caller_can_give_up() -> None:
    broker = await filled(2)
    reader = await broker.reader(dict.fromkeys(PLACES, 0))
    num_idle = 0
    async for page in read_until(reader, dict.fromkeys(PLACES, 2), timeout_ms=1):
        num_idle += not page
        if num_idle == 3:
            break
    assert num_idle == 3
