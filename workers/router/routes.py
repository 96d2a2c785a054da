"""Which colour a request goes to: route tables from the compacted topic of routes, and the split by hash.

Without a table everything goes to the first colour.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

import structlog

from schemas.codec import unpack
from schemas.envelope import ROUTES_TYPE, check_type
from schemas.errors import ConfigError, DecodeError, InvalidRequestError, StreamExpiredError, UnavailableError
from schemas.worker import Pool, RouteStamp, RouteTable
from streams.broker import Broker, Record, TopicPartition
from streams.topics import ROUTES, pool_topic

FULL_WEIGHT = 10_000
FIRST_COLOUR = "blue"
RETRY_S = 1.0
POLL_MS = 500

log = structlog.get_logger(__name__)


def choose_colour(weights: Mapping[str, int], key: str, salt: str) -> str:
    """Return the colour of a key. The same key and salt always give the same colour, whatever the partitioner does."""
    point = int.from_bytes(hashlib.sha256(f"{salt}|{key}".encode()).digest()[:8], "big") % FULL_WEIGHT
    upper = 0
    for colour, weight in sorted(weights.items()):
        upper += weight
        if point < upper:
            return colour
    raise AssertionError("weights add up to less than the whole")


def check_table(table: RouteTable) -> None:
    """Raise InvalidRequestError unless the weights are whole."""
    if any(weight < 0 for weight in table.weights.values()) or sum(table.weights.values()) != FULL_WEIGHT:
        raise InvalidRequestError(f"weights: must be at least 0 and add up to {FULL_WEIGHT}", field="weights")
    try:
        for colour in table.weights:
            pool_topic(table.pool, colour)
    except ConfigError as error:
        raise InvalidRequestError(f"weights: {error.message}", field="weights") from error


class RouteBook:
    """The newest route table of each pool."""

    def __init__(self) -> None:
        self.tables: dict[Pool, RouteTable] = {}

    def take(self, record: Record) -> None:
        """Apply a record of the topic of routes; older versions and what is no table are ignored."""
        if record.value is None:
            return
        try:
            check_type(record.headers, ROUTES_TYPE)
            table = unpack(record.value, RouteTable)
            check_table(table)
        except (DecodeError, InvalidRequestError) as error:
            log.warning("route_table_ignored", offset=record.offset, reason=error.message)
            return
        known = self.tables.get(table.pool)
        if known is None or table.version > known.version:
            self.tables[table.pool] = table

    def stamp(self, key: str) -> RouteStamp:
        """Return the colours for a session or a request without one."""
        colours = {pool: self._colour(pool, key) for pool in (Pool.INTENT, Pool.RETRIEVAL, Pool.GENERATION)}
        version = max((table.version for table in self.tables.values()), default=0)
        return RouteStamp(version=version, **{pool.value: colour for pool, colour in colours.items()})

    def _colour(self, pool: Pool, key: str) -> str:
        table = self.tables.get(pool)
        return choose_colour(table.weights, key, f"{pool}|{table.version}") if table else FIRST_COLOUR


async def follow_routes(broker: Broker, book: RouteBook, caught_up: asyncio.Event) -> None:
    """Keep `book` up to date for ever; sets `caught_up` when all records of the start are in."""
    while True:
        try:
            places = [TopicPartition(ROUTES, p) for p in range(await broker.partitions(ROUTES))]
            reader = await broker.reader(dict.fromkeys(places))
        except UnavailableError as error:
            log.warning("routes_unavailable", reason=error.message)
            await asyncio.sleep(RETRY_S)
            continue
        try:
            ends = await reader.end_offsets()
            for place, begin in (await reader.begin_offsets()).items():
                reader.seek(place, begin)
            while True:
                if all(reader.position(place) >= end for place, end in ends.items()):
                    caught_up.set()
                records = await reader.poll(timeout_ms=POLL_MS)
                for record in records:
                    book.take(record)
                if not records:
                    caught_up.set()  # compaction may have removed the last ones
        except (UnavailableError, StreamExpiredError) as error:
            log.warning("routes_unavailable", reason=error.message)
            await asyncio.sleep(RETRY_S)
        finally:
            await reader.close()
