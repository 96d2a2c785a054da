"""Ends of token topics are too low at worst: while the broker is away, and for what is written meanwhile."""

from __future__ import annotations

from streams.broker import TopicPartition
from streams.memory import MemoryBroker
from streams.topics import TOKENS
from tests.streams.token_fakes import broker_with_topics
from workers.router.stream_ends import StreamEnds


async def written(broker: MemoryBroker, count: int) -> None:
    producer = await broker.producer()
    for _ in range(count):
        await producer.send(TOKENS, b"x", partition=1)
    await producer.close()


async def test_the_end_of_a_partition_is_known_after_the_start() -> None:
    broker = await broker_with_topics()
    await written(broker, 3)
    ends = StreamEnds(broker, {TOKENS: 4})
    await ends.start()
    assert (ends.before(TOKENS, 1), ends.before(TOKENS, 0), ends.before("other", 0)) == (3, 0, 0)
    await ends.close()


async def test_a_broker_that_is_away_does_not_stop_the_start() -> None:
    broker = await broker_with_topics()
    await written(broker, 3)
    broker.down = True
    ends = StreamEnds(broker, {TOKENS: 4})
    await ends.start()
    assert ends.before(TOKENS, 1) == 0
    await ends.close()


async def test_what_was_just_written_is_known_at_once() -> None:
    broker = await broker_with_topics()
    ends = StreamEnds(broker, {TOKENS: 4})
    await ends.start()
    await written(broker, 2)
    ends.note(broker.records(TOKENS)[-1])
    assert ends.before(*TopicPartition(TOKENS, 1)) == 2
    await ends.close()
