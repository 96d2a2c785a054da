"""Route tables and the split by hash."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from schemas.codec import pack
from schemas.errors import InvalidRequestError
from schemas.worker import Pool, RouteTable
from streams.memory import MemoryBroker
from streams.topics import ROUTES, topic_specs
from tests.streams.token_fakes import until
from workers.router.routes import FULL_WEIGHT, RouteBook, RouteFollower, check_table, choose_colour


def test_everything_goes_to_the_first_colour_without_a_table() -> None:
    route = RouteBook().stamp("s-1")
    assert (route.intent, route.retrieval, route.generation, route.version) == ("blue", "blue", "blue", 0)


@given(st.integers(0, FULL_WEIGHT), st.text(max_size=20))
def test_colour_is_the_same_for_the_same_key(weight: int, key: str) -> None:
    weights = {"blue": FULL_WEIGHT - weight, "green": weight}
    assert choose_colour(weights, key, "salt") == choose_colour(weights, key, "salt")
    assert choose_colour(weights, key, "salt") in {colour for colour, share in weights.items() if share}


@pytest.mark.parametrize("share", [0.01, 0.25, 0.5])
def test_split_keeps_within_three_standard_deviations(share: float) -> None:
    num_keys = 20_000
    weights = {"blue": FULL_WEIGHT - int(share * FULL_WEIGHT), "green": int(share * FULL_WEIGHT)}
    num_green = sum(choose_colour(weights, f"session-{n}", "rollout-1") == "green" for n in range(num_keys))
    assert abs(num_green - share * num_keys) < 3 * math.sqrt(num_keys * share * (1 - share))


@pytest.mark.parametrize("weights", [{}, {"blue": 9_999}, {"blue": 10_001}, {"blue": 10_100, "green": -100}])
def test_table_that_is_not_whole_is_refused(weights: dict[str, int]) -> None:
    with pytest.raises(InvalidRequestError):
        check_table(RouteTable(pool=Pool.GENERATION, version=1, weights=weights))


@asynccontextmanager
async def following(broker: MemoryBroker) -> AsyncIterator[RouteBook]:
    book = RouteBook()
    follower = RouteFollower(broker, book, recheck_s=0.01)
    async with asyncio.timeout(5):
        await follower.start()
        try:
            yield book
        finally:
            await follower.close()
            await follower.close()


def offer(
    broker: MemoryBroker, version: int, weights: dict[str, int] | None = None, *, pool: Pool = Pool.GENERATION
) -> None:
    table = RouteTable(pool=pool, version=version, weights=weights or {"blue": FULL_WEIGHT})
    broker.append(ROUTES, pack(table), pool.value.encode(), (), 0)


async def test_book_follows_the_topic_and_ignores_older_versions_and_rubbish() -> None:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(1, colours=("blue", "green")))
    offer(broker, 2, {"green": FULL_WEIGHT})
    offer(broker, 1)
    broker.append(ROUTES, b"\xc1", b"generation", (), 0)
    broker.append(ROUTES, None, b"generation", (), 0)
    async with following(broker) as book:
        route = book.stamp("s-1")
        assert (route.generation, route.intent, route.version) == ("green", "blue", 2)
        offer(broker, 3)
        await until(lambda: book.stamp("s-1").version == 3)
    assert len(asyncio.all_tasks()) == 1


async def test_reading_catches_up_where_the_first_tables_have_left_the_topic() -> None:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(1))
    for version in (1, 2):
        offer(broker, version, pool=Pool.INTENT)
    broker.expire(ROUTES, 0, before=1)
    async with following(broker) as book:
        assert book.tables[Pool.INTENT].version == 2


async def test_a_table_is_used_once_the_topics_of_its_colours_are_there() -> None:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(1))
    offer(broker, 1)
    async with following(broker) as book:
        with capture_logs() as logs:
            offer(broker, 2, {"green": FULL_WEIGHT})
            await until(lambda: any(entry["event"] == "route_table_without_topic" for entry in logs))
        assert logs[0]["topics"] == ["gea.generation.green"]
        assert (book.stamp("s-1").generation, book.stamp("s-1").version) == ("blue", 1)
        await broker.create_topics(topic_specs(1, colours=("green",)))
        async with asyncio.timeout(5):
            await until(lambda: book.stamp("s-1").version == 2)
        assert book.stamp("s-1").generation == "green"


async def test_a_table_that_gives_a_missing_colour_nothing_is_used() -> None:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(1))
    offer(broker, 4, {"blue": FULL_WEIGHT, "green": 0})
    async with following(broker) as book:
        assert book.stamp("s-1").version == 4


@pytest.mark.parametrize("weights", [{"blue": 1_000, "green": 9_000}, {"green": FULL_WEIGHT}])
async def test_a_router_that_starts_with_a_missing_colour_gives_the_work_to_those_that_are_there(
    weights: dict[str, int],
) -> None:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(1))
    offer(broker, 7, weights)
    async with following(broker) as book:
        assert {book.stamp(f"s-{n}").generation for n in range(50)} == {"blue"}
        await broker.create_topics(topic_specs(1, colours=("green",)))
        await until(lambda: book.stamp("s-1").version == 7)


def test_a_table_with_a_colour_that_can_be_no_topic_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="colour"):
        check_table(RouteTable(pool=Pool.INTENT, version=1, weights={"a b": 10_000}))
