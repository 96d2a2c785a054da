"""A broker that goes away and comes back: sends fail in bounded time and work again, a group goes on."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from uuid import uuid4

import pytest

from ops.embedded import EmbeddedKafka, MissingPrerequisiteError
from schemas.errors import BrokerUnavailableError
from streams.broker import Producer, TopicPartition, TopicSpec
from streams.consumer import PoolConsumer
from streams.kafka import KafkaBroker
from streams.settings import BrokerSettings, ConsumerLimits
from tests.kafka.conftest import TIMEOUTS

pytestmark = pytest.mark.kafka

LIMITS = ConsumerLimits(batch_size=1, max_wait_ms=0, commit_interval_ms=50, poll_timeout_ms=100)


async def test_sends_fail_in_time_while_the_broker_is_away_and_work_after(tmp_path: Path) -> None:
    kafka = EmbeddedKafka(tmp_path)
    try:
        await kafka.start()
    except MissingPrerequisiteError as error:
        pytest.skip(str(error))
    assert kafka.handle is not None
    port = kafka.handle.port
    topic = f"test-{uuid4().hex[:8]}"
    try:
        async with KafkaBroker(BrokerSettings(bootstrap=kafka.bootstrap), TIMEOUTS) as broker:
            await broker.create_topics([TopicSpec(name=topic, num_partitions=1)])
            producer = await broker.producer()
            async with PoolConsumer(broker, [topic], group=f"{topic}-g", member="a", limits=LIMITS) as pool:
                batches = pool.batches()
                await producer.send(topic, b"before")
                (first,) = await anext(batches)
                first.done()
                await kafka.stop()
                began = time.monotonic()
                with pytest.raises(BrokerUnavailableError):
                    await producer.send(topic, b"during")
                assert time.monotonic() - began < 2 * TIMEOUTS.send_ms / 1000
                kafka = EmbeddedKafka(tmp_path, port=port)
                await kafka.start()
                async with asyncio.timeout(60):
                    while not await _sent(producer, topic):
                        pass
                    while (delivery := (await anext(batches))[0]).record.value != b"after":
                        delivery.done()
                    delivery.done()
                    assert await pool.drain(10)
            await producer.close()
            reader = await broker.reader({TopicPartition(topic, 0): None})
            assert reader.position(TopicPartition(topic, 0)) > delivery.record.offset
            await reader.close()
    finally:
        await kafka.stop()


async def _sent(producer: Producer, topic: str) -> bool:
    try:
        await producer.send(topic, b"after")
    except BrokerUnavailableError:
        return False
    return True
