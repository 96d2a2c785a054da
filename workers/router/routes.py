"""Which colour a request goes to: route tables from the compacted topic of routes, and the split by hash.

Without a table everything goes to the first colour. The invariant: a table is used only once the topics of all colours
that it gives work to have been seen; until then requests go on by the last one that works.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping

import structlog

from schemas.codec import unpack
from schemas.envelope import ROUTES_TYPE, check_type
from schemas.errors import ConfigError, DecodeError, InvalidRequestError, UnavailableError
from schemas.worker import Pool, RouteStamp, RouteTable
from streams.broker import Broker, Record
from streams.follower import TopicFollower
from streams.racing import end_tasks
from streams.topics import ROUTES, pool_topic

FULL_WEIGHT = 10_000
FIRST_COLOUR = "blue"
RECHECK_S = 2.0  # between looks for a topic that is missing

log = structlog.get_logger(__name__)


def choose_colour(weights: Mapping[str, int], key: str, salt: str) -> str:
    """Return the colour of a key. The same key and salt always give the same colour, whatever the partitioner does."""
    point = int.from_bytes(hashlib.sha256(f"{salt}|{key}".encode()).digest()[:8], "big") % sum(weights.values())
    upper = 0
    for colour, weight in sorted(weights.items()):
        upper += weight
        if point < upper:
            return colour
    raise AssertionError("the point lies below the sum")


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
    """The route tables: those in use, and newer ones whose topics have not been seen yet."""

    def __init__(self) -> None:
        self.tables: dict[Pool, RouteTable] = {}
        self.offered: dict[Pool, RouteTable] = {}
        self.news = asyncio.Event()
        self._refused: dict[Pool, int] = {}

    def take(self, record: Record, *, is_live: bool = False) -> None:
        """Read a record of the topic of routes; older versions and what is no table are ignored."""
        if record.value is None:
            return
        try:
            check_type(record.headers, ROUTES_TYPE)
            table = unpack(record.value, RouteTable)
            check_table(table)
        except (DecodeError, InvalidRequestError) as error:
            log.warning("route_table_ignored", offset=record.offset, reason=error.message)
            return
        if all(table.version > known.version for known in self._known(table.pool)):
            self.offered[table.pool] = table
            self.news.set()

    def settle(self, pool: Pool, missing: frozenset[str]) -> None:
        """Use the offered table of a pool unless topics of colours are `missing`.

        Where no table is in use yet, the colours that are there share the work, or the first one takes it.
        """
        table = self.offered[pool]
        if not missing:
            del self.offered[pool]
            self.tables[pool] = table
            return
        if self._refused.get(pool) != table.version:
            self._refused[pool] = table.version
            topics = [pool_topic(pool, colour) for colour in sorted(missing)]
            log.error("route_table_without_topic", pool=pool, version=table.version, topics=topics)
        weights = {colour: weight for colour, weight in table.weights.items() if weight and colour not in missing}
        if pool not in self.tables and weights:
            self.tables[pool] = RouteTable(pool=pool, version=0, weights=weights)

    def stamp(self, key: str) -> RouteStamp:
        """Return the colours for a session or a request without one."""
        colours = {pool: self._colour(pool, key) for pool in (Pool.INTENT, Pool.RETRIEVAL, Pool.GENERATION)}
        version = max((table.version for table in self.tables.values()), default=0)
        return RouteStamp(version=version, **{pool.value: colour for pool, colour in colours.items()})

    def _known(self, pool: Pool) -> tuple[RouteTable, ...]:
        return tuple(tables[pool] for tables in (self.tables, self.offered) if pool in tables)

    def _colour(self, pool: Pool, key: str) -> str:
        table = self.tables.get(pool)
        return choose_colour(table.weights, key, f"{pool}|{table.version}") if table else FIRST_COLOUR


class RouteFollower:
    """Keeps a book up to date: reads the topic, and looks whether the topics that a table names are there."""

    def __init__(self, broker: Broker, book: RouteBook, *, recheck_s: float = RECHECK_S) -> None:
        self._broker = broker
        self._book = book
        self._recheck_s = recheck_s
        self._follower = TopicFollower(broker, ROUTES, book.take)
        self._checking: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read what the topic holds, however long the broker stays away, and go on in the background."""
        self._follower.start_soon()
        await self._follower.caught_up.wait()
        await self._check()
        self._checking = asyncio.create_task(self._check_forever())

    async def close(self) -> None:
        """Stop. Idempotent."""
        task, self._checking = self._checking, None
        await end_tasks(task)
        await self._follower.close()

    async def _check_forever(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._recheck_s if self._book.offered else None):
                    await self._book.news.wait()
            except TimeoutError:
                pass
            await self._check()

    async def _check(self) -> None:
        self._book.news.clear()
        for pool, table in list(self._book.offered.items()):
            try:
                missing = await self._missing(table)
            except (UnavailableError, ConfigError) as error:
                log.warning("routes_unchecked", pool=pool, reason=error.message)
                continue
            if self._book.offered.get(pool) is table:
                self._book.settle(pool, missing)

    async def _missing(self, table: RouteTable) -> frozenset[str]:
        named = [colour for colour, weight in table.weights.items() if weight]
        return frozenset([c for c in named if not await self._broker.partitions(pool_topic(table.pool, c))])
