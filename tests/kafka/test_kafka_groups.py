"""A group seen from outside: its members come and go, its offsets are those that were committed."""

from __future__ import annotations

from uuid import uuid4

import pytest

from schemas.errors import BrokerUnavailableError
from streams.broker import TopicPartition, TopicSpec
from streams.consumer import PoolConsumer
from streams.kafka import KafkaBroker
from streams.kafka_groups import KafkaGroups
from streams.settings import BrokerSettings, ConsumerLimits
from tests.kafka.conftest import TIMEOUTS

pytestmark = pytest.mark.kafka


async def test_members_and_committed_offsets_of_a_group_are_seen(broker: KafkaBroker, bootstrap: str) -> None:
    topic = f"test-{uuid4().hex[:8]}"
    group = f"{topic}-g"
    await broker.create_topics([TopicSpec(name=topic, num_partitions=1)])
    producer = await broker.producer()
    async with KafkaGroups(BrokerSettings(bootstrap=bootstrap), TIMEOUTS) as groups:
        limits = ConsumerLimits(batch_size=1, max_wait_ms=0, commit_interval_ms=20, poll_timeout_ms=50)
        async with PoolConsumer(broker, [topic], group=group, member="me", limits=limits) as pool:
            await producer.send(topic, b"one")
            (delivery,) = await anext(pool.batches())
            assert list((await groups.view(group)).members.values()) == ["gea-me"]
            delivery.done()
            assert await pool.drain(5)
        assert (await groups.view(group)).members == {}
        assert await groups.committed(group) == {TopicPartition(topic, 0): 1}
        assert await groups.committed(f"{group}-unknown") == {}
    await producer.close()


async def test_an_absent_broker_is_said_to_be_away() -> None:
    async with KafkaGroups(BrokerSettings(bootstrap="127.0.0.1:1"), TIMEOUTS) as groups:
        with pytest.raises(BrokerUnavailableError):
            await groups.view("any")
