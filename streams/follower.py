"""Follows a whole topic in no group: every record in order of its partition, now and for ever, over broker outages.

For views of a topic that many processes keep alike: who works, where requests go, what is cancelled. It knows
positions, not what records mean. The invariant: `take` sees every retained record from the start on at least once
and in order; after an outage it goes on where it stood, and where that place has expired, at the first retained record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import TracebackType
from typing import Protocol, Self

import structlog

from schemas.errors import BrokerUnavailableError, ConfigError, GeaError, StreamExpiredError, UnavailableError
from streams.broker import Broker, LogReader, Record, TopicPartition

POLL_MS = 500
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0
MAX_EMPTY_POLLS = 3  # compaction may have removed the last records: after so many the start counts as read

log = structlog.get_logger(__name__)


class Start(StrEnum):
    """Where following begins."""

    BEGINNING = "beginning"
    """At the first retained record."""
    END = "end"
    """At the end that the topic has when it is opened first."""


class Take(Protocol):
    """What is done with a record. What it raises is logged and counted; the next record comes all the same."""

    def __call__(self, record: Record, *, is_live: bool) -> None:
        """Take a record. `is_live`: it was written after the topic was opened, or opened again."""
        ...


class TopicFollower:
    """Follows one topic. `async with` starts and stops it; `on_expired` is called before it begins anew."""

    def __init__(
        self,
        broker: Broker,
        topic: str,
        take: Take,
        *,
        start: Start = Start.BEGINNING,
        on_expired: Callable[[], None] | None = None,
    ) -> None:
        self.topic = topic
        self.caught_up = asyncio.Event()
        """Set once everything is read that the topic held when it was opened first."""
        self.is_reading = False
        """Whether the topic could be read at the last try."""
        self.num_skipped = 0
        self._broker = broker
        self._take = take
        self._start = start
        self._on_expired = on_expired
        self._positions: dict[TopicPartition, int] = {}
        self._ends: Mapping[TopicPartition, int] = {}
        self._num_empty_polls = 0
        self._reader: LogReader | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read what the topic holds and go on in the background. Raises BrokerUnavailableError."""
        try:
            await self._open()
            while not self.caught_up.is_set():
                await self._read()
        except StreamExpiredError:
            await self._begin_anew()  # the background task catches up
        self.start_soon()

    def start_soon(self) -> None:
        """Begin in the background, however long the broker or the topic stays away; see `caught_up`. Idempotent."""
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name=f"follow {self.topic}")

    async def end_offsets(self) -> Mapping[TopicPartition, int]:
        """Ask where the topic ends now. Raises BrokerUnavailableError."""
        if self._reader is None:
            raise BrokerUnavailableError(f"{self.topic} is not being read")
        return await self._reader.end_offsets()

    def has_reached(self, ends: Mapping[TopicPartition, int]) -> bool:
        """Return whether every record below `ends` has been taken."""
        return all(self._positions.get(place, 0) >= end for place, end in ends.items())

    async def close(self) -> None:
        """Stop. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        await self._close_reader()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self) -> None:
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                if self._reader is None:
                    await self._open()
                await self._read()
                backoff_s = FIRST_BACKOFF_S
            except StreamExpiredError as error:
                log.warning("followed_topic_expired", topic=self.topic, reason=error.message)
                await self._begin_anew()
            except (UnavailableError, ConfigError) as error:  # a refusal may pass as well, as a right that comes late
                if self.is_reading or not self.caught_up.is_set():
                    log.warning("followed_topic_unavailable", topic=self.topic, reason=error.message)
                self.is_reading = False
                await self._close_reader()
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, MAX_BACKOFF_S)

    async def _open(self) -> None:
        num_partitions = await self._broker.partitions(self.topic)
        if not num_partitions:
            raise BrokerUnavailableError(f"there is no topic {self.topic}")
        places = [TopicPartition(self.topic, number) for number in range(num_partitions)]
        self._reader = reader = await self._broker.reader({place: self._positions.get(place) for place in places})
        self._ends = dict(await reader.end_offsets())
        if not self._positions:
            starts = await reader.begin_offsets() if self._start is Start.BEGINNING else self._ends
            for place, offset in starts.items():
                reader.seek(place, offset)
            self._positions = dict(starts)
        self._notice_end()

    async def _read(self) -> None:
        assert self._reader is not None
        records = await self._reader.poll(timeout_ms=POLL_MS)
        self.is_reading = True
        self._apply(records)
        # Not from the last record: a reader steps over what compaction has removed.
        self._positions = {place: self._reader.position(place) for place in self._positions}
        self._num_empty_polls = 0 if records else self._num_empty_polls + 1
        self._notice_end()

    def _apply(self, records: Sequence[Record]) -> None:
        """The edge of a view: a record that it cannot take must not stop it from following."""
        for record in records:
            try:
                self._take(record, is_live=record.offset >= self._ends.get(record.place, 0))
            except Exception as error:
                self.num_skipped += 1
                reason = error.message if isinstance(error, GeaError) else f"{type(error).__name__}: {error}"
                log.warning(
                    "record_skipped",
                    topic=record.topic,
                    partition=record.partition,
                    offset=record.offset,
                    reason=reason,
                )

    def _notice_end(self) -> None:
        if self._num_empty_polls >= MAX_EMPTY_POLLS or all(
            self._positions[place] >= end for place, end in self._ends.items()
        ):
            self.caught_up.set()

    async def _begin_anew(self) -> None:
        """Go on at the first retained record: what was not read is gone."""
        if self._on_expired is not None:
            self._on_expired()
        self._positions.clear()
        self._start = Start.BEGINNING
        await self._close_reader()

    async def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()
