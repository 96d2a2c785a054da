"""A Kafka producer whose sends end in bounded time, and which is rebuilt when its client has died.

Idempotence is off: an idempotent aiokafka producer can wait for ever for a broker that is gone (aiokafka#1101), and
repeats are recognised by readers anyway. The order of one partition holds, because a batch is in flight alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import structlog
from aiokafka import AIOKafkaProducer

from schemas.envelope import Headers
from schemas.errors import BrokerUnavailableError, InvalidRequestError
from streams.broker import Record
from streams.deadlines import Deadlines
from streams.kafka_client import client_options, stop_producer, translated
from streams.routing import murmur2_partition
from streams.settings import BrokerSettings, Timeouts

log = structlog.get_logger(__name__)

MAX_REQUEST_BYTES = 1_048_576  # one record; the topics allow a little more for Kafka's framing


class KafkaProducer:
    """Writes records. `start` must have been called; the caller closes it.

    `partitions` asks how many partitions a topic has, 0 for none: aiokafka cannot tell a topic that is not there from
    a broker that is not.
    """

    def __init__(
        self, settings: BrokerSettings, timeouts: Timeouts, partitions: Callable[[str], Awaitable[int]]
    ) -> None:
        self._partitions = partitions
        self._known: set[str] = set()
        self._lines: dict[str, asyncio.Event] = {}  # of topics that are being asked for
        self._settings = settings
        self._timeouts = timeouts
        self._client: Any = None
        self._stuck: Any = None
        self._is_closed = False
        self._rebuilding = asyncio.Lock()
        self._acknowledgements = Deadlines()

    async def start(self) -> None:
        """Connect. Raises BrokerUnavailableError."""
        client = AIOKafkaProducer(
            **client_options(self._settings, self._timeouts),
            acks="all",
            enable_idempotence=False,
            linger_ms=0,
            max_request_size=MAX_REQUEST_BYTES,
        )
        try:
            with translated("connect a producer"):
                async with asyncio.timeout(self._timeouts.request_ms / 1000):
                    await client.start()
            if self._is_closed:  # while it was being rebuilt
                raise BrokerUnavailableError("the producer is closed")
        except BaseException:
            await stop_producer(client, self._timeouts.close_ms)
            raise
        self._client = client

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> Record:
        """Append one record and wait for all replicas; see `streams.broker.Producer`."""
        if value is None and key is None:
            raise InvalidRequestError("a record needs a key or a value")
        client = await self._live_client()
        deadline = asyncio.get_running_loop().time() + self._timeouts.send_ms / 1000
        try:
            with translated(f"send to {topic}"):
                known = client.client.cluster.partitions_for_topic(topic)
                if not known or topic not in self._known or topic in self._lines:
                    async with asyncio.timeout_at(deadline):
                        await self._check_topic(client, topic)
                        known = await client.partitions_for(topic)
                place = _partition(topic, known, key, partition)
                future = await client.send(topic, value, key=key, partition=place, headers=list(headers))
                written = await self._acknowledgements.await_until(deadline, future)
        except BrokerUnavailableError as error:
            self._known.discard(topic)
            if isinstance(error.__cause__, TimeoutError):
                self._stuck = client  # its own limits have failed: the next send rebuilds it
            raise
        return Record(
            topic=topic,
            partition=written.partition,
            offset=written.offset,
            timestamp_ms=written.timestamp,
            key=key,
            value=value,
            headers=tuple(headers),
        )

    async def close(self) -> None:
        """Flush and close, in bounded time. Idempotent."""
        self._is_closed = True
        client, self._client = self._client, None
        if client is not None:
            await stop_producer(client, self._timeouts.close_ms)

    async def _check_topic(self, client: Any, topic: str) -> None:
        """Refuse a topic that is not there, before the client asks for it for ever and in every request.

        Who comes while it is being asked for waits in line, so that sends keep their order.
        """
        line = self._lines.get(topic)
        while line is not None:
            await (asyncio.sleep(0) if line.is_set() else line.wait())
            if topic in self._known:
                return
            later = self._lines.get(topic)
            line = None if later is line else later
        await self._ask_for(client, topic)

    async def _ask_for(self, client: Any, topic: str) -> None:
        line = self._lines[topic] = asyncio.Event()
        try:
            if not await self._partitions(topic):
                raise InvalidRequestError(f"there is no topic {topic}", field="topic")
            await client.partitions_for(topic)
            self._known.add(topic)
        finally:
            line.set()  # all who wait go on in the loop's next turn, in their order, and others after them
            asyncio.get_running_loop().call_soon(self._close_line, topic, line)

    def _close_line(self, topic: str, line: asyncio.Event) -> None:
        if self._lines.get(topic) is line:
            del self._lines[topic]

    async def _live_client(self) -> Any:
        if self._is_closed:
            raise BrokerUnavailableError("the producer is closed")
        client = self._client
        if client is None or client is self._stuck or client._sender.sender_task.done():
            await self._rebuild(client)
        if self._client is None:
            raise BrokerUnavailableError("the producer could not be rebuilt")
        return self._client

    async def _rebuild(self, broken: Any) -> None:
        """Replace a dead client. It is stopped first, so that none of its records comes after those of the next."""
        async with self._rebuilding:
            if self._is_closed or self._client is not broken:
                return
            log.warning("producer_rebuilt")
            self._client = self._stuck = None
            if broken is not None:
                await stop_producer(broken, self._timeouts.close_ms)
            await self.start()


def _partition(topic: str, known: set[int], key: bytes | None, partition: int | None) -> int | None:
    if partition is not None and partition not in known:
        raise InvalidRequestError(f"partition: {topic} has no partition {partition}", field="partition")
    if partition is None and key is not None:
        return murmur2_partition(key, len(known))
    return partition
