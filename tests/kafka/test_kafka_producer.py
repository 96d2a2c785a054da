"""A producer whose client has died on a broker that lives."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from streams.broker import TopicSpec
from streams.kafka import KafkaBroker

pytestmark = pytest.mark.kafka


async def test_a_producer_whose_sender_has_died_is_rebuilt(broker: KafkaBroker) -> None:
    topic = f"test-{uuid4().hex[:8]}"
    await broker.create_topics([TopicSpec(name=topic, num_partitions=1)])
    producer = await broker.producer()
    try:
        first = await producer.send(topic, b"before")
        sender = producer._client._sender.sender_task
        sender.cancel()
        await asyncio.gather(sender, return_exceptions=True)
        async with asyncio.timeout(10):
            second = await producer.send(topic, b"after")
        assert (first.offset, second.offset) == (0, 1)
    finally:
        await producer.close()
