"""A TCP proxy that spoils connections on demand: between Kafka's clients and the broker, or anywhere in a test.

Knows bytes only. Faults are set for all connections, present and future (`faults`), or done at once to those that are
open (`cut`, `half_close`). The invariant: without a fault every byte passes, in order, and each direction is closed
when its sender closes it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from streams.racing import end_tasks

READ_BYTES = 65_536
RESET = struct.pack("ii", 1, 0)  # SO_LINGER on, 0 s: close() sends RST instead of FIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What happens to every connection. `bytes_per_s` 0 means no limit; a blackhole accepts and swallows."""

    delay_s: float = 0.0
    bytes_per_s: int = 0
    is_blackhole: bool = False
    is_refusing: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s <= 3_600:
            raise ValueError(f"delay_s: {self.delay_s} is not allowed: 0 to 3600")
        if self.bytes_per_s < 0:
            raise ValueError(f"bytes_per_s: {self.bytes_per_s} is not allowed: 0 or more")


class _Link:
    """One client's connection and ours to the server behind."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self.client = client
        self.server = server
        self.is_half_closed = False

    def cut(self) -> None:
        """Reset both sides: what is on its way is lost."""
        for writer in (self.client, self.server):
            _reset(writer)

    def half_close(self) -> None:
        """End the direction from server to client; what the client sends still passes."""
        self.is_half_closed = True
        with contextlib.suppress(OSError, RuntimeError):
            self.client.write_eof()


class Proxy:
    """Forwards `port` of the loopback address to `target`; `async with` opens and closes it.

    `port=None` takes a free one. The target may be away: then new connections are reset, as a dead server's would be.
    """

    def __init__(self, target: tuple[str, int], *, port: int | None = None) -> None:
        self.target = target
        self.faults = Faults()
        self.num_accepted = 0
        self.num_refused = 0
        self.num_bytes = 0
        self._port = port or 0
        self._server: asyncio.Server | None = None
        self._links: set[_Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._healed = asyncio.Event()
        self._healed.set()

    @property
    def port(self) -> int:
        """Return where clients connect."""
        assert self._server is not None, "not started"
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    @property
    def address(self) -> str:
        """Return where clients connect: `host:port`."""
        return f"127.0.0.1:{self.port}"

    @property
    def num_open(self) -> int:
        """Return how many connections are open."""
        return len(self._links)

    def set_faults(self, **changes: Any) -> None:
        """Change what happens to every connection from now on; names as in `Faults`. Raises ValueError."""
        self.faults = replace(self.faults, **changes)
        if self.faults.is_blackhole:
            self._healed.clear()
        else:
            self._healed.set()

    def heal(self) -> None:
        """Let everything pass again. What a blackhole has swallowed stays lost, so its connections are cut."""
        was_blackhole = self.faults.is_blackhole
        self.faults = Faults()
        if was_blackhole:
            self.cut()
        self._healed.set()

    def cut(self, count: int | None = None) -> int:
        """Reset open connections, all or the `count` oldest; return how many."""
        chosen = list(self._links)[:count]
        for link in chosen:
            link.cut()
        return len(chosen)

    def half_close(self, count: int | None = None) -> int:
        """End the direction to the client of open connections; return how many."""
        chosen = list(self._links)[:count]
        for link in chosen:
            link.half_close()
        return len(chosen)

    async def start(self) -> None:
        """Listen."""
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port)

    async def stop(self) -> None:
        """Close the port and every connection. Idempotent."""
        server, self._server = self._server, None
        if server is None:
            return
        server.close()
        self.cut()
        await end_tasks(*self._tasks)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._serve(reader, writer)
        except asyncio.CancelledError:
            pass  # by `stop`: nobody awaits this task, and asyncio would report it
        finally:
            self._tasks.discard(task)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server = None if self.faults.is_refusing else await _connect(self.target)
        if server is None:
            self.num_refused += 1
            _reset(writer)
            return
        self.num_accepted += 1
        answers, requests = server
        link = _Link(writer, requests)
        self._links.add(link)
        try:
            await asyncio.gather(self._pump(link, reader, requests), self._pump(link, answers, writer))
        except (OSError, asyncio.IncompleteReadError):
            link.cut()  # one side is gone: so is the other
        finally:
            self._links.discard(link)
            for side in (writer, requests):
                side.close()

    async def _pump(self, link: _Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Move bytes one way until their sender closes."""
        while chunk := await reader.read(READ_BYTES):
            if self.faults.is_blackhole or (link.is_half_closed and writer is link.client):
                continue
            if self.faults.delay_s:
                await asyncio.sleep(self.faults.delay_s)
            if self.faults.bytes_per_s:
                await asyncio.sleep(len(chunk) / self.faults.bytes_per_s)
            if link.is_half_closed and writer is link.client:
                continue  # in the meantime
            self.num_bytes += len(chunk)
            writer.write(chunk)
            await writer.drain()
        await self._healed.wait()  # in a blackhole not even the end of the stream arrives
        with contextlib.suppress(OSError):
            writer.write_eof()


async def _connect(target: tuple[str, int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
    try:
        return await asyncio.open_connection(*target)
    except OSError:
        return None


def _reset(writer: asyncio.StreamWriter) -> None:
    raw: socket.socket | None = writer.get_extra_info("socket")
    if raw is not None:
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.transport.abort()
