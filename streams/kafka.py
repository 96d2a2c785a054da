"""Kafka behind the protocols of `streams.broker`, by aiokafka.

The parts: `kafka_client` (options, errors, bounded stop), `kafka_producer`, `kafka_group`, `kafka_reader` and
`kafka_control`. They reach into aiokafka where its public side cannot be made safe; the version is pinned for that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from streams.broker import AssignedCallback, RevokedCallback, TopicPartition, TopicSpec
from streams.kafka_control import KafkaControl
from streams.kafka_group import KafkaGroupConsumer
from streams.kafka_producer import KafkaProducer
from streams.kafka_reader import KafkaReader
from streams.settings import BrokerSettings, Timeouts


class KafkaBroker:
    """A Kafka cluster. Nothing connects before it is asked for; `async with` closes what the broker itself holds."""

    def __init__(self, settings: BrokerSettings, timeouts: Timeouts | None = None) -> None:
        self._settings = settings
        self._timeouts = timeouts or Timeouts()
        self._control = KafkaControl(self._settings, self._timeouts)

    @property
    def name(self) -> str:
        """Return what the broker is, for people. The protocol does not tell which software answers."""
        return f"Kafka at {self._settings.bootstrap}"

    async def producer(self) -> KafkaProducer:
        """Make a started producer. The caller closes it."""
        producer = KafkaProducer(self._settings, self._timeouts, self.partitions)
        await producer.start()
        return producer

    async def group_consumer(
        self,
        topics: Sequence[str],
        *,
        group: str,
        member: str,
        on_revoked: RevokedCallback,
        on_assigned: AssignedCallback,
    ) -> KafkaGroupConsumer:
        """Join a group; returns when this member has its partitions. The caller closes it."""
        consumer = KafkaGroupConsumer(
            self._settings, self._timeouts, self._control, topics, group, member, on_revoked, on_assigned
        )
        await consumer.start()
        return consumer

    async def reader(self, places: Mapping[TopicPartition, int | None]) -> KafkaReader:
        """Read partitions from offsets (None: from the end). The caller closes it."""
        reader = KafkaReader(self._settings, self._timeouts, self._control)
        await reader.start(places)
        return reader

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions, 0 if there is no such topic."""
        return await self._control.partitions(topic)

    async def create_topics(self, specs: Sequence[TopicSpec]) -> Sequence[str]:
        """Create the topics that are missing and return their names."""
        return await self._control.create_topics(specs)

    async def api_versions(self) -> Mapping[str, int]:
        """Return the version of each request that aiokafka and the broker have agreed on."""
        return await self._control.api_versions()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._control.close()
