"""Which workers live: every worker publishes its status each second, and everybody may read along.

The topic is compacted by worker_id, a record without a value means that the worker has gone. A worker that falls
silent counts as gone after `max_age_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import structlog

from schemas.codec import pack, unpack
from schemas.envelope import CE_TYPE, WORKER_TYPE, check_type
from schemas.errors import DecodeError, GeaError, InvalidRequestError
from schemas.ranges import check_status
from schemas.worker import Pool, WorkerState, WorkerStatus
from streams.broker import Broker, Producer, Record
from streams.clock import now_ms
from streams.follower import TopicFollower
from streams.topics import WORKERS

log = structlog.get_logger(__name__)


class Heartbeat:
    """Publishes a worker's status every `interval_s` and at once on `beat()`; a tombstone when it stops.

    `status` is asked each time. While the broker is away beats are lost and counted, nothing else happens.
    """

    def __init__(
        self,
        producer: Producer,
        status: Callable[[], WorkerStatus],
        *,
        interval_s: float = 1.0,
        topic: str = WORKERS,
    ) -> None:
        self.num_lost = 0
        self._producer = producer
        self._status = status
        self._interval_s = interval_s
        self._topic = topic
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._worker_id = ""

    def beat(self) -> None:
        """Publish now: the state has changed."""
        self._wake.set()

    async def start(self) -> None:
        """Publish the first status and go on. A broker that is away does not stop the start."""
        await self._publish()
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write the tombstone. Idempotent, does not close the producer."""
        task, self._task = self._task, None
        if task is None:
            return
        task.cancel()
        await asyncio.wait((task,))
        await self._send(None)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _run(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._interval_s):
                    await self._wake.wait()
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                await self._publish()
            except Exception:  # a fault in telling how the worker is must not make it look dead
                log.exception("heartbeat_failed", worker_id=self._worker_id)

    async def _publish(self) -> None:
        status = self._status()
        self._worker_id = status.worker_id
        await self._send(pack(status))

    async def _send(self, value: bytes | None) -> None:
        headers = ((CE_TYPE, WORKER_TYPE.encode()),)
        try:
            await self._producer.send(self._topic, value, key=self._worker_id.encode(), headers=headers)
        except GeaError as error:
            if not self.num_lost:
                log.warning("heartbeat lost", worker_id=self._worker_id, error=error.message)
            self.num_lost += 1
            return
        self.num_lost = 0


class Roster:
    """The statuses as the topic has them; feed it records in order. `clock_ms` is the reader's Unix time."""

    def __init__(self, *, max_age_s: float = 5.0, clock_ms: Callable[[], int] = now_ms) -> None:
        self.num_undecodable = 0
        self._max_age_ms = int(max_age_s * 1000)
        self._clock_ms = clock_ms
        self._seen: dict[str, tuple[WorkerStatus, int]] = {}

    def apply(self, record: Record, *, is_live: bool) -> None:
        """Take a record. `is_live`: it was written while we read, so that only our clock counts for its age."""
        if record.value is None:
            self._seen.pop((record.key or b"").decode(errors="replace"), None)
            return
        try:
            check_type(record.headers, WORKER_TYPE)
            status = unpack(record.value, WorkerStatus)
            check_status(status)
        except (DecodeError, InvalidRequestError):
            self.num_undecodable += 1
            return
        self._seen[status.worker_id] = (status, self._clock_ms() if is_live else status.updated_ms)

    def workers(
        self, pool: Pool | None = None, colour: str | None = None, state: WorkerState | None = None
    ) -> tuple[WorkerStatus, ...]:
        """Return the workers that live, by id."""
        oldest = self._clock_ms() - self._max_age_ms
        self._forget(oldest)
        found = (status for _, (status, seen_ms) in sorted(self._seen.items()) if seen_ms >= oldest)
        return tuple(
            status
            for status in found
            if pool in (None, status.pool) and colour in (None, status.colour) and state in (None, status.state)
        )

    def _forget(self, oldest: int) -> None:
        """Drop those that fell silent long ago, so that the roster stays bounded."""
        silent = [worker_id for worker_id, (_, seen_ms) in self._seen.items() if seen_ms < oldest - self._max_age_ms]
        for worker_id in silent:
            del self._seen[worker_id]


class Directory:
    """Reads the topic of workers from its beginning and keeps a Roster. `async with` starts and stops it."""

    def __init__(
        self,
        broker: Broker,
        *,
        topic: str = WORKERS,
        max_age_s: float = 5.0,
        clock_ms: Callable[[], int] = now_ms,
    ) -> None:
        self._roster = Roster(max_age_s=max_age_s, clock_ms=clock_ms)
        self._follower = TopicFollower(broker, topic, self._take)
        self._changed = asyncio.Event()

    @property
    def is_reading(self) -> bool:
        """Return whether the topic could be read at the last try."""
        return self._follower.is_reading

    def workers(
        self, pool: Pool | None = None, colour: str | None = None, state: WorkerState | None = WorkerState.READY
    ) -> tuple[WorkerStatus, ...]:
        """Return the workers that live; by default those that are ready. `state=None` means any."""
        return self._roster.workers(pool, colour, state)

    async def changed(self) -> None:
        """Wait for the next record."""
        await self._changed.wait()

    async def wait_until(self, is_true: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until a condition holds, asked after every record and at least each second; False if time is up."""
        deadline = time.monotonic() + timeout_s
        while not is_true():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            try:
                async with asyncio.timeout(min(left, 1.0)):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return True

    async def start(self) -> None:
        """Open the topic and read what it holds. Raises BrokerUnavailableError."""
        await self._follower.start()

    def start_soon(self) -> None:
        """Begin in the background, however long the broker stays away: until then no worker is known."""
        self._follower.start_soon()

    async def close(self) -> None:
        """Stop reading. Idempotent."""
        await self._follower.close()

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

    def _take(self, record: Record, *, is_live: bool) -> None:
        self._roster.apply(record, is_live=is_live)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
