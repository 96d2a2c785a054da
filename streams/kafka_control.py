"""Questions to Kafka that no producer and no consumer asks: offsets of the log, topics, versions.

They go over a connection of their own, because an answer about offsets would wait behind a long fetch, and so that a
rebalance callback may ask without touching the consumer that it belongs to.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.admin import AIOKafkaAdminClient, NewTopic
from aiokafka.errors import NoError, TopicAlreadyExistsError, for_code
from aiokafka.protocol.commit import OffsetCommitRequest, OffsetFetchRequest
from aiokafka.protocol.coordination import FindCoordinatorRequest
from aiokafka.protocol.fetch import FetchRequest
from aiokafka.protocol.group import HeartbeatRequest, JoinGroupRequest, LeaveGroupRequest, SyncGroupRequest
from aiokafka.protocol.metadata import MetadataRequest
from aiokafka.protocol.offset import OffsetRequest
from aiokafka.protocol.produce import ProduceRequest

from schemas.errors import BrokerUnavailableError, ConfigError
from streams.broker import TopicPartition, TopicSpec
from streams.kafka_client import client_options, kafka_place, our_place, stop_consumer, translated
from streams.settings import BrokerSettings, Timeouts

REQUESTS = (
    ProduceRequest,
    FetchRequest,
    OffsetRequest,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    FindCoordinatorRequest,
    JoinGroupRequest,
    SyncGroupRequest,
    HeartbeatRequest,
    LeaveGroupRequest,
)


class KafkaControl:
    """One connection for such questions, made on first use and again after a failure."""

    def __init__(self, settings: BrokerSettings, timeouts: Timeouts) -> None:
        self._settings = settings
        self._timeouts = timeouts
        self._client: Any = None
        self._connecting = asyncio.Lock()

    async def begin_offsets(self, places: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the offset of the first retained record of each partition."""
        async with self._asking("ask for the first offsets") as client:
            found = await client.beginning_offsets([kafka_place(place) for place in places])
        return {our_place(place): offset for place, offset in found.items()}

    async def end_offsets(self, places: Iterable[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the offset after the last record of each partition."""
        async with self._asking("ask for the end offsets") as client:
            found = await client.end_offsets([kafka_place(place) for place in places])
        return {our_place(place): offset for place, offset in found.items()}

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions, 0 if there is no such topic; never creates it."""
        async with self._admin("ask for a topic") as admin:
            if topic not in await admin.list_topics():
                return 0
            (found,) = await admin.describe_topics([topic])
            return len(found["partitions"])

    async def create_topics(self, specs: Sequence[TopicSpec]) -> Sequence[str]:
        """Create the topics that are missing and return their names. Raises ConfigError for one that Kafka refuses."""
        async with self._admin("create topics") as admin:
            present = set(await admin.list_topics())
            missing = [spec for spec in specs if spec.name not in present]
            if not missing:
                return []
            answer = await admin.create_topics([_new_topic(spec) for spec in missing])
        created = []
        for name, code, *text in answer.topic_errors:
            error = for_code(code)
            if error is NoError:
                created.append(name)
            elif error is not TopicAlreadyExistsError:  # somebody else was quicker
                raise ConfigError(f"topic {name}: {error.__name__}: {text[0] if text else ''}")
        return created

    async def api_versions(self) -> Mapping[str, int]:
        """Return the version of each request that this client and the broker have agreed on."""
        async with self._asking("ask for the versions") as client:
            await client.topics()  # so that there is a connection
            (versions, *_) = [conn._versions for conn in client._client._conns.values() if conn._versions]
        return {request.__name__.removesuffix("Request"): _agreed(request, versions) for request in REQUESTS}

    async def close(self) -> None:
        """Close in bounded time. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            await stop_consumer(client, self._timeouts.close_ms)

    @asynccontextmanager
    async def _asking(self, action: str) -> AsyncIterator[Any]:
        client = await self._connected()
        try:
            with translated(action):
                async with asyncio.timeout(self._timeouts.request_ms / 1000):
                    yield client
        except BrokerUnavailableError:
            if self._client is client:
                await self.close()  # the next question connects anew
            raise

    async def _connected(self) -> Any:
        async with self._connecting:
            if self._client is None:
                client = AIOKafkaConsumer(
                    **client_options(self._settings, self._timeouts), group_id=None, enable_auto_commit=False
                )
                try:
                    with translated("connect"):
                        async with asyncio.timeout(self._timeouts.request_ms / 1000):
                            await client.start()
                except BaseException:
                    await stop_consumer(client, self._timeouts.close_ms)
                    raise
                self._client = client
            return self._client

    @asynccontextmanager
    async def _admin(self, action: str) -> AsyncIterator[Any]:
        admin = AIOKafkaAdminClient(**client_options(self._settings, self._timeouts))
        try:
            with translated(action):
                async with asyncio.timeout(2 * self._timeouts.request_ms / 1000):
                    await admin.start()
                    yield admin
        finally:
            await admin.close()


def _new_topic(spec: TopicSpec) -> Any:
    return NewTopic(
        name=spec.name,
        num_partitions=spec.num_partitions,
        replication_factor=spec.replication,
        topic_configs=dict(spec.settings),
    )


def _agreed(request: Any, versions: Mapping[int, tuple[int, int]]) -> int:
    low, high = versions[request.API_KEY]
    return max(int(each.API_VERSION) for each in request._CLASSES if low <= each.API_VERSION <= high)
