"""Ask a server on the loopback address whether it answers, over its own protocol.

No client library: what is asked must be the server itself, not the address that it advertises (a proxy may stand
there), and clients are made in `streams` alone. A ping never raises and never takes longer than its limit.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable

PING_TIMEOUT_S = 1.0
METADATA_KEY, METADATA_VERSION = 3, 4  # understood by Kafka 0.11 to 4.x (KIP-896)
MAX_ANSWER_BYTES = 1 << 20

_Reader = Callable[[asyncio.StreamReader], Awaitable[bytes]]


async def ping_kafka(port: int) -> bool:
    """Return whether the broker serves metadata and lists a live broker, as a client needs it."""
    client_id = b"gea-ping"
    body = struct.pack(">hhih", METADATA_KEY, METADATA_VERSION, 1, len(client_id)) + client_id
    body += struct.pack(">i?", 0, False)  # no topics, create none
    answer = await _exchange(port, struct.pack(">i", len(body)) + body, _read_sized)
    # size-less answer: correlation id, throttle time, number of brokers
    return len(answer) >= 12 and struct.unpack_from(">iii", answer)[2] > 0


async def ping_redis(port: int) -> bool:
    """Return whether the server answers PING; it does not while it loads its data."""
    return await _exchange(port, b"PING\r\n", _read_line) == b"+PONG\r\n"


async def _exchange(port: int, request: bytes, read: _Reader) -> bytes:
    try:
        async with asyncio.timeout(PING_TIMEOUT_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            try:
                writer.write(request)
                return await read(reader)
            finally:
                writer.close()
                await writer.wait_closed()
    except (OSError, TimeoutError, asyncio.IncompleteReadError, ValueError):
        return b""


async def _read_sized(reader: asyncio.StreamReader) -> bytes:
    (size,) = struct.unpack(">i", await reader.readexactly(4))
    return await reader.readexactly(min(max(size, 0), MAX_ANSWER_BYTES))


async def _read_line(reader: asyncio.StreamReader) -> bytes:
    return await reader.readline()
