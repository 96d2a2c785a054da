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

pytestmark = pytest.mark.kafka

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


@pytest.mark.soak
@pytest.mark.timeout(420)
async def test_five_minutes_of_work_with_a_poll_interval_of_twenty_seconds_are_normal(bootstrap: str) -> None:
    topic = f"five-{uuid4().hex[:8]}"
    async with KafkaBroker(BrokerSettings(bootstrap=bootstrap), Timeouts(max_poll_interval_ms=20_000)) as broker:
        await broker.create_topics([TopicSpec(name=topic, num_partitions=2)])
        producer = await broker.producer()
        await producer.send(topic, b"long", partition=0)
        limits = ConsumerLimits(batch_size=1, max_wait_ms=1, max_in_flight=8, stuck_ms=15_000)
        async with PoolConsumer(broker, [topic], group=topic, member="m", limits=limits) as consumer:
            batches = consumer.batches()
            (delivery,) = await anext(batches)
            for _ in range(30):
                await asyncio.sleep(10)  # the thing tested is that time passes
                await producer.send(topic, b"short", partition=1)
                (short,) = await anext(batches)
                assert short.record.partition == 1
                short.done()
            assert delivery.is_leased()
            assert (consumer.statistics().num_rebuilds, consumer.statistics().generation) == (0, delivery.generation)
            delivery.done()
            assert await consumer.drain(5)
        member = await _member(broker, topic)
        try:
            assert [await member.committed(TopicPartition(topic, number)) for number in range(2)] == [1, 30]
        finally:
            await member.close()
            await producer.close()


async def test_a_rebalance_that_outlasts_the_poll_interval_leaves_a_member_that_may_join_again(bootstrap: str) -> None:
    topic = f"outlast-{uuid4().hex[:8]}"
    async with KafkaBroker(BrokerSettings(bootstrap=bootstrap), HASTY) as broker:
        await broker.create_topics([TopicSpec(name=topic, num_partitions=1)])
        member = await _member(broker, topic)
        try:
            generation = member._generation
            member._settled.clear()  # as between the two callbacks of a rebalance
            until = asyncio.get_running_loop().time() + 2 * HASTY.max_poll_interval_ms / 1000
            while asyncio.get_running_loop().time() < until:
                assert await member.poll(timeout_ms=100, max_records=1) == ()
            member._client._coordinator.request_rejoin()
            async with asyncio.timeout(5):
                await member._settled.wait()
            assert member._generation == generation + 1, "it was never thrown out for idleness"
        finally:
            await member.close()


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
