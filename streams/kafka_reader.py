"""Reads given Kafka partitions from given offsets, in no group and committing nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka.errors import OffsetOutOfRangeError

from schemas.errors import StreamExpiredError
from streams.broker import Record, TopicPartition
from streams.kafka_client import client_options, kafka_place, stop_consumer, translated
from streams.kafka_control import KafkaControl
from streams.kafka_fetch import Fetch
from streams.settings import BrokerSettings, Timeouts

FETCH_WAIT_MS = 100  # how long a partition that was just sought may wait behind a running fetch


class KafkaReader:
    """Reads a log; `start` must have been called."""

    def __init__(self, settings: BrokerSettings, timeouts: Timeouts, control: KafkaControl) -> None:
        self._timeouts = timeouts
        self._control = control
        self._positions: dict[TopicPartition, int] = {}
        self._client: Any = AIOKafkaConsumer(
            **client_options(settings, timeouts),
            group_id=None,
            enable_auto_commit=False,
            auto_offset_reset="none",
            fetch_max_wait_ms=FETCH_WAIT_MS,
            max_partition_fetch_bytes=2 * 1024 * 1024,
        )
        self._fetch = Fetch(self._client)

    async def start(self, places: Mapping[TopicPartition, int | None]) -> None:
        """Connect and stand at the given offsets (None: the end). Raises BrokerUnavailableError."""
        try:
            unknown = [place for place, offset in places.items() if offset is None]
            ends = await self._control.end_offsets(unknown) if unknown else {}
            self._positions = {place: ends[place] if offset is None else offset for place, offset in places.items()}
            with translated("connect a reader"):
                async with asyncio.timeout(self._timeouts.request_ms / 1000):
                    await self._client.start()
        except BaseException:
            await self.close()
            raise
        self._client.assign([kafka_place(place) for place in self._positions])
        for place, offset in self._positions.items():
            self._client.seek(kafka_place(place), offset)

    async def poll(self, *, timeout_ms: int, max_records: int = 500) -> Sequence[Record]:
        """Return the next records. Raises StreamExpiredError for an offset that has left the log."""
        with translated("read"):
            try:
                records = await self._fetch(timeout_ms, max_records)
            except OffsetOutOfRangeError as error:
                self._raise_if_expired(error)
                return ()
        for record in records:
            self._positions[record.place] = record.offset + 1
        return records

    async def end_offsets(self) -> Mapping[TopicPartition, int]:
        """Return the offset after the last record of each partition."""
        return await self._control.end_offsets(self._positions)

    async def begin_offsets(self) -> Mapping[TopicPartition, int]:
        """Return the offset of the first retained record of each partition."""
        return await self._control.begin_offsets(self._positions)

    def position(self, place: TopicPartition) -> int:
        """Return the offset of the next record that `poll` will hand out."""
        return self._positions[place]

    def seek(self, place: TopicPartition, offset: int) -> None:
        """Go on from `offset`."""
        self._positions[place] = offset
        self._client.seek(kafka_place(place), offset)

    async def close(self) -> None:
        """Close in bounded time. Idempotent."""
        await stop_consumer(self._client, self._timeouts.close_ms)

    def _raise_if_expired(self, error: Any) -> None:
        """Raise unless the reader has been sought elsewhere since the fetch."""
        for place, offset in error.args[0].items():
            if self._positions.get(TopicPartition(place.topic, place.partition)) == offset:
                raise StreamExpiredError(f"{place.topic}-{place.partition}: offset {offset} is not there") from error
