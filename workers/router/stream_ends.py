"""Where a new token stream begins at the earliest: cached end offsets of the token topics.

A cached value is too low at worst, which is safe: readers skip what is not theirs. A client's own value is never
trusted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import structlog

from schemas.errors import ConfigError, UnavailableError
from streams.broker import Broker, LogReader, Record, TopicPartition
from streams.racing import end_tasks

REFRESH_S = 2.0

log = structlog.get_logger(__name__)


class StreamEnds:
    """Keeps the end offsets of token topics, given with their partition counts."""

    def __init__(self, broker: Broker, num_partitions: Mapping[str, int]) -> None:
        self._broker = broker
        self._places = [TopicPartition(topic, p) for topic, count in num_partitions.items() for p in range(count)]
        self._ends: dict[TopicPartition, int] = {}
        self._noted: dict[TopicPartition, int] = {}
        self._reader: LogReader | None = None
        self._task: asyncio.Task[None] | None = None

    def before(self, topic: str, partition: int) -> int:
        """Return an offset at or before the end of a partition."""
        return self._ends.get(TopicPartition(topic, partition), 0)

    def note(self, record: Record) -> None:
        """Note a record that was just written: the end of its partition lies behind it."""
        self._noted[record.place] = max(record.offset + 1, self._noted.get(record.place, 0))
        self._ends[record.place] = max(record.offset + 1, self.before(*record.place))

    async def start(self) -> None:
        """Ask once and go on asking. A broker that has just gone away does not stop the start: 0 is safe as well."""
        await self._try_refresh()
        self._task = asyncio.create_task(self._refresh_forever())

    async def close(self) -> None:
        """Stop asking. Idempotent."""
        task, self._task = self._task, None
        await end_tasks(task)
        await self._close_reader()

    async def _refresh(self) -> None:
        if self._reader is None:
            self._reader = await self._broker.reader(dict.fromkeys(self._places))
        self._noted.clear()  # an answer that is on its way may be older than what is noted from now on
        for place, end in (await self._reader.end_offsets()).items():
            self._ends[place] = max(end, self._noted.get(place, 0))

    async def _refresh_forever(self) -> None:
        while True:
            await asyncio.sleep(REFRESH_S)
            await self._try_refresh()

    async def _try_refresh(self) -> None:
        try:
            await self._refresh()
        except (UnavailableError, ConfigError) as error:
            log.warning("stream_ends_stale", reason=error.message)
            await self._close_reader()

    async def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()
