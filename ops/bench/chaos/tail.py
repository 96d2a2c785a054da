"""The token log from outside: followed while it grows, and read whole at the end; through a listener without faults."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self

from ops.bench.chaos.checker import Entry, Received
from schemas.envelope import HOP, REQUEST_ID, header
from schemas.tokens import Kind
from streams.broker import Broker, Record, TopicPartition
from streams.follower import Start, TopicFollower
from streams.reading import read_until
from streams.token_reader import decode_token
from streams.topics import RETRY_DELAYS_S, TOKENS

READ_MS = 2_000


class Tail:
    """Follows the token topic; `claimed` is set by each claim that stands alone: somebody takes a request over."""

    def __init__(self, broker: Broker) -> None:
        self.claimed = asyncio.Event()
        self.num_records = 0
        self._follower = TopicFollower(broker, TOKENS, self._take, start=Start.END)

    async def ends(self) -> Mapping[TopicPartition, int]:
        """Ask where the topic ends now. Raises BrokerUnavailableError."""
        return await self._follower.end_offsets()

    async def __aenter__(self) -> Self:
        await self._follower.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._follower.close()

    def _take(self, record: Record, *, is_live: bool) -> None:
        self.num_records += 1
        if decode_token(record).kind is Kind.CLAIM:
            self.claimed.set()


async def read_topic(broker: Broker, topic: str) -> list[Record]:
    """Return every record of a topic, in the order of its partitions."""
    places = {TopicPartition(topic, number): 0 for number in range(await broker.partitions(topic))}
    reader = await broker.reader(dict(places))
    try:
        ends = await reader.end_offsets()
        found: list[Record] = []
        for place, begin in (await reader.begin_offsets()).items():
            reader.seek(place, begin)
        async for records in read_until(reader, ends, timeout_ms=READ_MS):
            found += records
    finally:
        await reader.close()
    return sorted(found, key=lambda record: (record.partition, record.offset))


async def read_tokens(broker: Broker) -> dict[str, list[Entry]]:
    """Return the whole token log by request."""
    by_request: dict[str, list[Entry]] = defaultdict(list)
    for record in await read_topic(broker, TOKENS):
        entry = Entry(
            partition=record.partition,
            offset=record.offset,
            timestamp_ms=record.timestamp_ms,
            record=decode_token(record),
        )
        by_request[(record.key or b"").decode()].append(entry)
    return dict(by_request)


async def read_received(broker: Broker, topic: str) -> list[Received]:
    """Return the records of a pool's topic, each with whether its request was handed on afterwards."""
    records = await read_topic(broker, topic)
    retried = {_request_id(record) for name in RETRY_DELAYS_S for record in await read_topic(broker, name)}
    return received(records, retried)


def received(records: Sequence[Record], retried: set[str]) -> list[Received]:
    """Return what a pool was given; a record is handed on if a retry or one of a higher hop follows. Pure."""
    hops: dict[str, int] = defaultdict(int)
    for record in records:
        hops[_request_id(record)] = max(hops[_request_id(record)], _hop(record))
    return [
        Received(
            place=record.place,
            offset=record.offset,
            request_id=_request_id(record),
            is_handed_on=_request_id(record) in retried or _hop(record) < hops[_request_id(record)],
        )
        for record in records
    ]


def _request_id(record: Record) -> str:
    return header(record.headers, REQUEST_ID) or ""


def _hop(record: Record) -> int:
    return int(header(record.headers, HOP) or 0)
