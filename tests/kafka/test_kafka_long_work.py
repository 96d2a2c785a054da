"""Work that takes longer than Kafka's poll interval is normal, and one assignor is all that a member offers."""

from __future__ import annotations

import asyncio
from uuid import uuid4

import pytest

from streams.broker import Assignment, TopicPartition, TopicSpec
from streams.consumer import PoolConsumer
from streams.kafka import KafkaBroker
from streams.kafka_group import KafkaGroupConsumer
from streams.settings import BrokerSettings, ConsumerLimits, Timeouts

pytestmark = [pytest.mark.kafka, pytest.mark.slow]

# The shortest that a broker and our own checks allow.
HASTY = Timeouts(
    request_ms=5_000,
    send_ms=6_000,
    close_ms=3_000,
    session_ms=1_500,
    heartbeat_ms=200,
    rebalance_ms=2_000,
    max_poll_interval_ms=1_500,
)


async def test_a_delivery_held_for_three_poll_intervals_stays_ours_and_is_committed(bootstrap: str) -> None:
    topic = f"long-{uuid4().hex[:8]}"
    place = TopicPartition(topic, 0)
    async with KafkaBroker(BrokerSettings(bootstrap=bootstrap), HASTY) as broker:
        await broker.create_topics([TopicSpec(name=topic, num_partitions=1)])
        producer = await broker.producer()
        await producer.send(topic, b"long", partition=0)
        limits = ConsumerLimits(batch_size=1, max_wait_ms=1, max_in_flight=1, commit_interval_ms=100)
        async with PoolConsumer(broker, [topic], group=topic, member="m", limits=limits) as consumer:
            batches = consumer.batches()
            (delivery,) = await anext(batches)
            generation = consumer.statistics().generation
            await asyncio.sleep(3 * HASTY.max_poll_interval_ms / 1000)  # the thing tested is that time passes
            assert delivery.is_current()
            assert consumer.statistics().generation == generation
            delivery.done()
            await producer.send(topic, b"next", partition=0)
            (following,) = await anext(batches)
            assert following.record.value == b"next"
            following.done()
            await consumer.drain(5)
        member = await _member(broker, topic)
        try:
            assert await member.committed(place) == 2
        finally:
            await member.close()
            await producer.close()


async def test_a_member_offers_exactly_one_assignor(broker: KafkaBroker) -> None:
    topic = f"one-{uuid4().hex[:8]}"
    await broker.create_topics([TopicSpec(name=topic, num_partitions=1)])
    member = await _member(broker, topic)
    try:
        assert len(member._client._coordinator._assignors) == 1
    finally:
        await member.close()


async def _member(broker: KafkaBroker, topic: str) -> KafkaGroupConsumer:
    async def on_revoked(places: frozenset[TopicPartition]) -> None:
        return None

    async def on_assigned(assignment: Assignment) -> None:
        return None

    return await broker.group_consumer(
        [topic], group=topic, member="again", on_revoked=on_revoked, on_assigned=on_assigned
    )
