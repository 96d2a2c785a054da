"""Each fault does what it says, and without one every byte passes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from ops.bench.proxy import Proxy

BLOB = bytes(range(256)) * 4_096


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while chunk := await reader.read(65_536):
            writer.write(chunk)
            await writer.drain()
        writer.write(b"<end>")
    except OSError:
        pass
    finally:
        writer.close()


@asynccontextmanager
async def proxied_echo() -> AsyncIterator[Proxy]:
    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    try:
        async with Proxy((host, port)) as proxy:
            yield proxy
    finally:
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def connected(proxy: Proxy) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection on which one byte has gone there and back."""
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, text: bytes) -> bytes:
    writer.write(text)
    async with asyncio.timeout(5):
        return await reader.readexactly(len(text))


async def test_every_byte_passes_in_order_and_the_end_too() -> None:
    async with proxied_echo() as proxy, connected(proxy) as (reader, writer):
        writer.write(BLOB)
        writer.write_eof()
        async with asyncio.timeout(10):
            assert await reader.read(-1) == BLOB + b"<end>"
        assert proxy.num_accepted == 1


async def test_a_cut_resets_what_is_open_and_lets_new_connections_in() -> None:
    async with proxied_echo() as proxy:
        async with connected(proxy) as (reader, writer):
            assert await ask(reader, writer, b"a") == b"a"
            assert proxy.cut() == 1
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
        async with connected(proxy) as (reader, writer):
            assert await ask(reader, writer, b"b") == b"b"


async def test_a_half_close_ends_one_direction_only() -> None:
    async with proxied_echo() as proxy, connected(proxy) as (reader, writer):
        assert await ask(reader, writer, b"a") == b"a"
        before = proxy.num_bytes
        assert proxy.half_close() == 1
        async with asyncio.timeout(5):
            assert await reader.read(-1) == b""
            writer.write(b"still heard")
            while proxy.num_bytes < before + len(b"still heard"):  # noqa: ASYNC110 - one turn of the loop each
                await asyncio.sleep(0)
            writer.write(b"and answered to nobody")
            while proxy.num_bytes < before + len(b"still heardand answered to nobody"):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0)
            assert proxy.num_open == 1


async def test_a_delay_holds_bytes_back() -> None:
    async with proxied_echo() as proxy, connected(proxy) as (reader, writer):
        proxy.set_faults(delay_s=0.05)
        began = time.monotonic()
        assert await ask(reader, writer, b"a") == b"a"
        assert time.monotonic() - began >= 0.1  # there and back


async def test_a_throttle_bounds_the_rate() -> None:
    async with proxied_echo() as proxy, connected(proxy) as (reader, writer):
        proxy.set_faults(bytes_per_s=100_000)
        began = time.monotonic()
        assert await ask(reader, writer, b"x" * 10_000) == b"x" * 10_000
        assert time.monotonic() - began >= 0.1


async def test_a_blackhole_accepts_and_answers_nothing_until_it_is_healed() -> None:
    async with proxied_echo() as proxy:
        proxy.set_faults(is_blackhole=True)
        async with connected(proxy) as (reader, writer):
            writer.write(b"lost")
            writer.write_eof()
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.1):
                    await reader.read(1)
            proxy.heal()
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
        async with connected(proxy) as (reader, writer):
            assert await ask(reader, writer, b"b") == b"b"


async def test_a_refusing_proxy_resets_newcomers_and_keeps_the_others() -> None:
    async with proxied_echo() as proxy, connected(proxy) as (reader, writer):
        assert await ask(reader, writer, b"a") == b"a"
        proxy.set_faults(is_refusing=True)
        async with connected(proxy) as (other, _):
            with pytest.raises(ConnectionResetError):
                await other.read(1)
        assert await ask(reader, writer, b"b") == b"b"
        assert proxy.num_refused == 1


async def test_a_target_that_is_away_looks_like_a_dead_server() -> None:
    async with proxied_echo() as proxy:
        proxy.target = ("127.0.0.1", 1)
        async with connected(proxy) as (reader, _):
            with pytest.raises(ConnectionResetError):
                await reader.read(1)


@pytest.mark.parametrize("changes", [{"delay_s": -1}, {"delay_s": 1e9}, {"bytes_per_s": -1}])
def test_a_fault_out_of_range_is_refused_by_name(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(changes))):
        Proxy(("127.0.0.1", 1)).set_faults(**changes)
