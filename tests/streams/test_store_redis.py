"""RedisStore on a real server: the contract, a server that dies in the middle, and random cancellation."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ops.embedded import EmbeddedRedis, MissingPrerequisiteError
from schemas.errors import StoreUnavailableError
from streams.breaker import BreakerState, CircuitBreaker
from streams.session import SessionStore, Turn
from streams.settings import StoreSettings
from streams.store import RedisStore, redis_client
from tests.streams.store_contract import check_store

pytestmark = pytest.mark.redis


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[EmbeddedRedis]:
    server = EmbeddedRedis(tmp_path)
    try:
        await server.start()
    except MissingPrerequisiteError as error:
        pytest.skip(str(error))
    yield server
    await server.stop()


def state_of(store: RedisStore) -> BreakerState:
    return store.breaker.state


def store_on(url: str, timeout_ms: int = 5_000) -> RedisStore:
    breaker = CircuitBreaker(max_failures=3, retry_after_s=0.05)
    return RedisStore(StoreSettings(url=url, timeout_ms=timeout_ms), breaker=breaker)


async def test_the_store_on_a_real_server_keeps_the_contract(server: EmbeddedRedis) -> None:
    async with store_on(server.url) as store:
        await check_store(store)


async def test_values_expire_on_the_server(server: EmbeddedRedis) -> None:
    async with store_on(server.url) as store:
        await store.set("k", b"v", ttl_s=0.001)
        async with asyncio.timeout(5):
            while await store.get("k") is not None:
                pass


async def test_a_server_that_dies_costs_bounded_time_and_is_found_again(tmp_path: Path, server: EmbeddedRedis) -> None:
    assert server.handle is not None
    port, pid = server.handle.port, server.handle.pid
    async with store_on(server.url, timeout_ms=200) as store:
        sessions = SessionStore(store)
        await sessions.append_turn("t", "s", Turn(request_id="r1", user="q", assistant="a"))
        async with asyncio.timeout(10), asyncio.TaskGroup() as group:
            for _ in range(20):
                group.create_task(sessions.last_turns("t", "s", 5))
            os.kill(pid, signal.SIGKILL)
        await server.stop()
        for _ in range(3):
            began = time.monotonic()
            assert await sessions.last_turns("t", "s", 5) == ()
            assert time.monotonic() - began < 1
        assert state_of(store) is BreakerState.OPEN
        began = time.monotonic()
        for _ in range(1_000):
            if store.breaker.state is BreakerState.OPEN:
                await sessions.last_turns("t", "s", 5)
        assert time.monotonic() - began < 2
        assert sessions.num_outages == 1
        async with EmbeddedRedis(tmp_path, port=port), asyncio.timeout(20):
            again = Turn(request_id="r2", user="q", assistant="a")
            while not await sessions.append_turn("t", "s", again):  # noqa: ASYNC110 - the breaker sets the pace
                await asyncio.sleep(0)
            assert sessions.is_available
            assert state_of(store) is BreakerState.CLOSED
            assert "r2" in [turn.request_id for turn in await sessions.last_turns("t", "s", 5)]


async def test_a_server_that_never_answers_is_given_up_in_time() -> None:
    writers: list[asyncio.StreamWriter] = []
    silent = await asyncio.start_server(lambda _, writer: writers.append(writer), "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    async with silent, store_on(f"redis://127.0.0.1:{port}/0", timeout_ms=100) as store:
        for _ in range(3):
            began = time.monotonic()
            with pytest.raises(StoreUnavailableError):
                await store.get("k")
            assert time.monotonic() - began < 1
        assert store.breaker.state is BreakerState.OPEN
        for writer in writers:
            writer.close()
            await writer.wait_closed()


@pytest.mark.parametrize("seed", range(5))
async def test_random_cancellation_never_mixes_up_replies(server: EmbeddedRedis, seed: int) -> None:
    chance = random.Random(seed)
    settings = StoreSettings(url=server.url, timeout_ms=5_000)
    async with RedisStore(settings, max_connections=4) as store:
        for number in range(50):
            await store.set(f"k{number}", b"%d" % number, ttl_s=60)
        num_cancelled = 0
        for _ in range(60):
            wanted = [chance.randrange(50) for _ in range(12)]
            tasks = [asyncio.create_task(store.get(f"k{number}")) for number in wanted]
            for task in tasks:
                for _ in range(chance.randrange(4)):
                    await asyncio.sleep(0)
                if chance.random() < 0.6:
                    task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for number, result in zip(wanted, results, strict=True):
                if isinstance(result, asyncio.CancelledError):
                    num_cancelled += 1
                else:
                    assert result == b"%d" % number
        assert num_cancelled > 20
        assert store.breaker.state is BreakerState.CLOSED


async def test_more_calls_than_connections_wait_their_turn(server: EmbeddedRedis) -> None:
    async with RedisStore(StoreSettings(url=server.url, timeout_ms=5_000), max_connections=2) as store:
        results = await asyncio.gather(*(store.set_if_absent(f"k{n}", b"%d" % n, ttl_s=60) for n in range(200)))
        assert results == [b"%d" % n for n in range(200)]


async def test_an_acl_user_is_let_in_by_its_password_and_keeps_to_its_keys(server: EmbeddedRedis) -> None:
    admin = redis_client(StoreSettings(url=server.url), server.url, 1)
    keys, categories = ["gea:*", "{gea:*"], ["+@all", "-@dangerous"]
    await admin.acl_setuser("gea", enabled=True, passwords=["+hush"], keys=keys, categories=categories)
    await admin.aclose()
    address = server.url.removeprefix("redis://")
    async with store_on(f"redis://gea:hush@{address}") as store:
        sessions = SessionStore(store)
        assert await sessions.append_turn("t", "s", Turn(request_id="r", user="hi", assistant="ho"))
        assert [turn.user for turn in await sessions.last_turns("t", "s", 3)] == ["hi"]
        with pytest.raises(StoreUnavailableError):
            await store.set("other", b"v", ttl_s=1)
    async with store_on(f"redis://gea:wrong@{address}") as store:
        with pytest.raises(StoreUnavailableError) as caught:
            await store.ping()
    assert "gea:wrong" not in str(caught.value)
