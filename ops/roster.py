"""Who works now, read from the tail of `gea.workers`, for commands that look once or wait for a state.

Every worker writes its status each second, so the last records of each partition tell all that is still true; the
topic may hold days of older ones, and a health check has no time for them. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from schemas.errors import UnavailableError
from schemas.worker import Pool, WorkerStatus
from streams.broker import Broker, LogReader, Record, TopicPartition
from streams.clock import now_ms
from streams.directory import Roster
from streams.reading import read_until
from streams.topics import WORKERS

TAIL_RECORDS = 1000  # per partition: 100 workers over 4 partitions fill it in 40 s
MAX_AGE_S = 10.0  # ten missed heartbeats
POOL_ORDER = {pool: number for number, pool in enumerate(Pool)}


class RosterReader:
    """The last status of every worker. `async with` opens it with what the log holds now; `poll` follows.

    Opening and `poll` raise UnavailableError when Kafka does not answer or the topic is missing.
    """

    def __init__(self, broker: Broker, *, max_age_s: float = MAX_AGE_S) -> None:
        self._broker = broker
        self._roster = Roster(max_age_s=max_age_s)
        self._reader: LogReader | None = None
        self._ends: dict[TopicPartition, int] = {}

    def workers(self, pool: Pool | None = None) -> list[WorkerStatus]:
        """Return the workers that live, in whatever state, by pool, colour and name."""
        found = self._roster.workers(pool)
        return sorted(found, key=lambda status: (POOL_ORDER[status.pool], status.colour, status.worker_id))

    async def poll(self, timeout_ms: int) -> None:
        """Take what has been written since; returns after `timeout_ms` at the latest."""
        assert self._reader is not None, "not open"
        self._apply(await self._reader.poll(timeout_ms=timeout_ms))

    async def __aenter__(self) -> Self:
        num_partitions = await self._broker.partitions(WORKERS)
        if not num_partitions:
            raise UnavailableError(f"there is no topic {WORKERS}: `gea topics apply` creates it")
        self._reader = await self._broker.reader(
            {TopicPartition(WORKERS, number): None for number in range(num_partitions)}
        )
        try:
            await self._catch_up(self._reader)
        except BaseException:
            await self._reader.close()
            raise
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._reader is not None:
            await self._reader.close()

    async def _catch_up(self, reader: LogReader) -> None:
        begins, ends = await asyncio.gather(reader.begin_offsets(), reader.end_offsets())
        self._ends = dict(ends)
        for place, end in ends.items():
            reader.seek(place, max(begins[place], end - TAIL_RECORDS))
        async for records in read_until(reader, ends, timeout_ms=100):
            self._apply(records)

    def _apply(self, records: Sequence[Record]) -> None:
        for record in records:
            self._roster.apply(record, is_live=record.offset >= self._ends[record.place])


def age_s(status: WorkerStatus) -> float:
    """Return the seconds since a worker last spoke, by its clock and ours."""
    return max(0.0, (now_ms() - status.updated_ms) / 1000)
