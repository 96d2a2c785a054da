"""Fuzzed records on every topic of an installation on real Kafka: as in memory, and the offsets are Kafka's."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from itertools import islice
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from ops.embedded import EmbeddedKafka, MissingPrerequisiteError
from streams.broker import TopicPartition
from streams.kafka import KafkaBroker
from streams.kafka_groups import KafkaGroups
from streams.kafka_producer import KafkaProducer
from streams.settings import BrokerSettings
from streams.topics import topic_specs
from tests.flow.besieged import MAX_SLOWDOWN, groups
from tests.flow.harness import NUM_PARTITIONS, Installation
from tests.fuzzing import fuzz
from tests.kafka.conftest import TIMEOUTS
from tests.siege import TEXT, Siege
from workers.generation.engine.fake import FakeEngine

pytestmark = pytest.mark.kafka

ROUND = 100
MAX_GROWTH_BYTES = 64 * 1024 * 1024
"""Of the process: the workers, and beside them the buffers of some twenty Kafka clients."""


@pytest_asyncio.fixture
async def settings(tmp_path: Path) -> AsyncIterator[BrokerSettings]:
    """A Kafka of its own: the topics of an installation are used by their names."""
    try:
        async with EmbeddedKafka(tmp_path / "kafka") as kafka:
            yield BrokerSettings(bootstrap=kafka.bootstrap)
    except MissingPrerequisiteError as error:
        pytest.skip(str(error))


class OwnProducers(KafkaBroker):
    """A broker that closes the producers it made: the installation of the tests leaves that to its broker."""

    def __init__(self, settings: BrokerSettings) -> None:
        super().__init__(settings, TIMEOUTS)
        self._made: list[KafkaProducer] = []

    async def producer(self) -> KafkaProducer:
        made = await super().producer()
        self._made.append(made)
        return made

    async def close_producers(self) -> None:
        for made in self._made:
            await made.close()


async def besiege(settings: BrokerSettings, seed: int, count: int) -> str:
    """Fuzz an installation and return the figures."""
    async with OwnProducers(settings) as broker, KafkaGroups(settings, TIMEOUTS) as asked:
        await broker.create_topics(topic_specs(NUM_PARTITIONS))
        gea = Installation()
        gea.broker = broker  # type: ignore[assignment]
        producer = await broker.producer()

        async def is_committed() -> bool:
            for topic, group in groups().items():
                places = [TopicPartition(topic, number) for number in range(await broker.partitions(topic))]
                reader = await broker.reader(dict.fromkeys(places))
                ends = await reader.end_offsets()
                await reader.close()
                committed = await asked.committed(group)
                if any(committed.get(place, 0) != ends[place] for place in places):
                    return False
            return True

        try:
            await gea.start_all(FakeEngine(TEXT))
            async with gea.client(60) as client:
                siege = Siege(gea, client, producer, is_committed)
                before = await siege.pace()
                sizes: list[int] = []
                for number in range(count // ROUND):
                    victim = f"victim-{number}"
                    await siege.round(list(islice(fuzz(seed + number, ROUND, victim=victim), ROUND)), victim)
                    siege.ledger.forget()
                    gc.collect()
                    sizes.append(psutil.Process().memory_info().rss)
                await siege.assert_views_intact()
                after = await siege.pace()
                assert siege.num_sent == count
                assert after > before / MAX_SLOWDOWN, (before, after)
                assert sizes[-1] - sizes[0] < MAX_GROWTH_BYTES, sizes
                pace = f"{before:.0f} requests per CPU second before, {after:.0f} after"
                return f"{siege.figures()}, {pace}, {sizes} bytes resident"
        finally:
            for running in list(gea.workers.values()):
                running.stop.set()
            await gea.close()
            await broker.close_producers()


async def test_fuzzed_records_are_each_accounted_for_and_do_no_harm(settings: BrokerSettings) -> None:
    await besiege(settings, 1, 300)


@pytest.mark.soak
@pytest.mark.timeout(1800)
async def test_ten_thousand_fuzzed_records_leave_memory_and_pace_as_they_were(settings: BrokerSettings) -> None:
    await besiege(settings, 1_000, 10_000)
