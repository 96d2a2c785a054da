"""Route tables and the split by hash."""

from __future__ import annotations

import asyncio
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import pack
from schemas.errors import InvalidRequestError
from schemas.worker import Pool, RouteTable
from streams.memory import MemoryBroker
from streams.topics import ROUTES, topic_specs
from workers.router.routes import FULL_WEIGHT, RouteBook, check_table, choose_colour, follow_routes


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


async def test_book_follows_the_topic_and_ignores_older_versions_and_rubbish() -> None:
    broker, book, caught_up = MemoryBroker(), RouteBook(), asyncio.Event()
    await broker.create_topics(topic_specs(1))
    producer = await broker.producer()
    for version, colour in ((2, "green"), (1, "blue")):
        table = RouteTable(pool=Pool.GENERATION, version=version, weights={colour: FULL_WEIGHT})
        await producer.send(ROUTES, pack(table), key=b"generation", partition=0)
    await producer.send(ROUTES, b"\xc1", key=b"generation", partition=0)
    await producer.send(ROUTES, None, key=b"generation", partition=0)
    following = asyncio.create_task(follow_routes(broker, book, caught_up))
    await caught_up.wait()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    route = book.stamp("s-1")
    assert (route.generation, route.intent, route.version) == ("green", "blue", 2)


async def test_reading_catches_up_where_the_first_tables_have_left_the_topic() -> None:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(1))
    producer = await broker.producer()
    for version in (1, 2):
        table = RouteTable(pool=Pool.INTENT, version=version, weights={"blue": 10_000})
        await producer.send(ROUTES, pack(table), key=b"intent")
    broker.expire(ROUTES, 0, before=1)
    book, caught_up = RouteBook(), asyncio.Event()
    following = asyncio.create_task(follow_routes(broker, book, caught_up))
    async with asyncio.timeout(5):
        await caught_up.wait()
    following.cancel()
    assert book.tables[Pool.INTENT].version == 2


def test_a_table_with_a_colour_that_can_be_no_topic_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="colour"):
        check_table(RouteTable(pool=Pool.INTENT, version=1, weights={"a b": 10_000}))
