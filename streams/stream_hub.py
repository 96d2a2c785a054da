"""One reader over all partitions of a token topic, for everybody in the process who follows a request.

Each request has a bounded inbox. One that is not emptied in time is dropped and marked: its owner reads on by itself,
from its own offset. The shared reader is never paused for anybody.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from schemas.errors import BrokerUnavailableError, StreamExpiredError
from streams.broker import Broker, LogReader, Record, TopicPartition
from streams.settings import check_range

MAX_BACKOFF_S = 2.0


class HubInbox:
    """The records of one request in one partition, from offset `start` on."""

    def __init__(self, hub: StreamHub, key: bytes, place: TopicPartition, start: int, max_records: int) -> None:
        self.key = key
        self.place = place
        self.start = start
        self._hub = hub
        self._max_records = max_records
        self._records: deque[Record] = deque()
        self._arrived = asyncio.Event()
        self._is_overflowed = False

    @property
    def is_overflowed(self) -> bool:
        """Return whether records were dropped: read on by yourself."""
        return self._is_overflowed

    async def poll(self, timeout_s: float) -> Sequence[Record]:
        """Return what has arrived; empty after `timeout_s` or when the inbox overflows."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._arrived.wait()
        self._arrived.clear()
        records = tuple(self._records)
        self._records.clear()
        return records

    def put(self, record: Record) -> None:
        """Take a record; called by the hub."""
        if len(self._records) >= self._max_records:
            self.drop()
        else:
            self._records.append(record)
            self._arrived.set()

    def drop(self) -> None:
        """Give up following: the owner reads on by itself."""
        self._is_overflowed = True
        self._records.clear()
        self._arrived.set()
        self.close()

    def close(self) -> None:
        """Take nothing more. Idempotent."""
        self._hub.forget(self)


class StreamHub:
    """Follows a token topic. `async with` starts and stops it.

    While the broker is away it tries again, and what was written meanwhile is read afterwards.
    """

    def __init__(self, broker: Broker, topic: str, *, max_records: int = 1_024, poll_timeout_ms: int = 500) -> None:
        check_range("hub.max_records", max_records, 1, 65_536)
        check_range("hub.poll_timeout_ms", poll_timeout_ms, 1, 5_000)
        self.topic = topic
        self._broker = broker
        self._max_records = max_records
        self._poll_timeout_ms = poll_timeout_ms
        self._inboxes: dict[bytes, set[HubInbox]] = {}
        self._positions: dict[TopicPartition, int | None] = {}
        self._reader: LogReader | None = None
        self._task: asyncio.Task[None] | None = None
        self._counts = {"records": 0, "dropped": 0, "reconnects": 0}

    @property
    def num_partitions(self) -> int:
        """Return the number of partitions of the topic."""
        return len(self._positions)

    @property
    def is_running(self) -> bool:
        """Return whether records are handed out, or will be when the broker is back."""
        return self._task is not None and not self._task.done()

    def statistics(self) -> dict[str, int]:
        """Return counters: records seen, inboxes dropped for being slow, reconnects, and inboxes now."""
        return {**self._counts, "inboxes": sum(len(inboxes) for inboxes in self._inboxes.values())}

    def follow(self, request_id: str, partition: int) -> HubInbox:
        """Take every record of a request from now on. `start` of the inbox is where "now" is; close the inbox."""
        place = TopicPartition(self.topic, partition)
        start = self._positions.get(place)
        if not self.is_running or start is None:
            raise BrokerUnavailableError(f"{self.topic} is not being read")
        inbox = HubInbox(self, request_id.encode(), place, start, self._max_records)
        self._inboxes.setdefault(inbox.key, set()).add(inbox)
        return inbox

    def forget(self, inbox: HubInbox) -> None:
        """Stop filling an inbox. Idempotent."""
        inboxes = self._inboxes.get(inbox.key, set())
        inboxes.discard(inbox)
        if not inboxes:
            self._inboxes.pop(inbox.key, None)

    async def start(self) -> None:
        """Read from the end of every partition on. Raises BrokerUnavailableError."""
        num_partitions = await self._broker.partitions(self.topic)
        if not num_partitions:
            raise BrokerUnavailableError(f"there is no topic {self.topic}")
        places: dict[TopicPartition, int | None] = {
            TopicPartition(self.topic, number): None for number in range(num_partitions)
        }
        self._reader = await self._broker.reader(places)
        self._positions = {place: self._reader.position(place) for place in places}
        self._task = asyncio.create_task(self._run())
        self._task.add_done_callback(self._drop_all)

    async def close(self) -> None:
        """Stop reading; open inboxes are dropped. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait((task,))
        await self._close_reader()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _run(self) -> None:
        backoff_s = 0.0
        while True:
            try:
                records = await self._poll()
                backoff_s = 0.0
            except StreamExpiredError:
                _warn("token topic moved past the reader", topic=self.topic)
                await self._skip_to_end()
                continue
            except BrokerUnavailableError as error:
                _warn("token topic cannot be read", topic=self.topic, error=error.message)
                self._counts["reconnects"] += 1
                await self._close_reader()
                await asyncio.sleep(backoff_s)
                backoff_s = min(max(2 * backoff_s, 0.05), MAX_BACKOFF_S)
                continue
            for record in records:
                self._hand_out(record)

    async def _poll(self) -> Sequence[Record]:
        if self._reader is None:
            self._reader = await self._broker.reader(self._positions)
            self._positions = {place: self._reader.position(place) for place in self._positions}
        return await self._reader.poll(timeout_ms=self._poll_timeout_ms)

    def _hand_out(self, record: Record) -> None:
        self._positions[record.place] = record.offset + 1
        self._counts["records"] += 1
        for inbox in tuple(self._inboxes.get(record.key or b"", ())):
            if inbox.place == record.place:
                inbox.put(record)
                self._counts["dropped"] += inbox.is_overflowed

    async def _skip_to_end(self) -> None:
        """Go on at the end; those who follow read what they missed by themselves."""
        self._drop_all()
        await self._close_reader()
        self._positions = dict.fromkeys(self._positions)

    def _drop_all(self, _: object = None) -> None:
        for inbox in [inbox for inboxes in self._inboxes.values() for inbox in inboxes]:
            inbox.drop()

    async def _close_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()


def _warn(event: str, **fields: str) -> None:
    import structlog  # here, because it would double the time to import the client

    structlog.get_logger(__name__).warning(event, **fields)
