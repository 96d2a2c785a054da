"""What the embedded servers have in common: start on a free port, wait until ready, stop.

A server differs only in its `Launch`: the command for a port, the question that tells readiness, the address for
clients. A port that somebody else takes between choice and bind is answered by another try.
"""

from __future__ import annotations

import abc
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from ops.embedded import process
from ops.embedded.errors import ServerError
from ops.embedded.process import ServerHandle

PORT_TRIES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """How one kind of server is started on a port."""

    name: str
    """Name and version."""
    command: Callable[[int], list[str]]
    ping: Callable[[int], Awaitable[bool]]
    address: Callable[[int], str]
    ready_timeout_s: float


class EmbeddedServer(abc.ABC):
    """One server. `start` and `stop`, or `async with`; both are safe to repeat.

    The folder is made if missing and kept at stop. With `port=None` a free port is chosen. With `detached` the server
    goes on when this process ends and is stopped later by its handle (`ops.embedded.stop`).
    """

    def __init__(self, folder: Path, log: Path, *, port: int | None, detached: bool) -> None:
        self.folder = folder.absolute()
        self.log = log.absolute()
        self.handle: ServerHandle | None = None
        self._port, self._detached = port, detached

    @property
    def address(self) -> str:
        """What clients connect to."""
        assert self.handle is not None, "not started"
        return self.handle.address

    async def start(self) -> ServerHandle:
        """Start the server and wait until it is ready for clients.

        Raises `MissingPrerequisiteError`, `PreparationError` or `ServerError` (its message names the log). When
        cancelled nothing is left running.
        """
        if self.handle is None or not process.is_running(self.handle):
            self.folder.mkdir(parents=True, exist_ok=True)
            self.handle = await self._launch_on_free_port(await self._prepare())
        return self.handle

    async def stop(self) -> None:
        """Stop the server in order, so that its data is complete; nothing happens if it does not run."""
        if self.handle is not None:
            await process.stop(self.handle)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    @abc.abstractmethod
    async def _prepare(self) -> Launch:
        """Find or make what the server needs."""

    async def _launch_on_free_port(self, launch: Launch) -> ServerHandle:
        for _ in range(PORT_TRIES - 1):
            log_start = self.log.stat().st_size if self.log.exists() else 0
            try:
                return await self._launch(launch)
            except ServerError:
                # A port that was asked for is not exchanged for another.
                if self._port is not None or not process.is_port_taken(self.log, log_start):
                    raise
        return await self._launch(launch)

    async def _launch(self, launch: Launch) -> ServerHandle:
        port = self._port or process.free_ports(1)[0]
        pid, created_at = process.spawn(launch.command(port), log=self.log, die_with_parent=not self._detached)
        try:
            await process.wait_ready(
                launch.name, pid, created_at, lambda: launch.ping(port), log=self.log, timeout_s=launch.ready_timeout_s
            )
        except BaseException:
            await process.stop_process(pid, created_at, grace_s=5.0)
            raise
        return ServerHandle(
            name=launch.name,
            address=launch.address(port),
            port=port,
            pid=pid,
            created_at=created_at,
            log=self.log,
        )
