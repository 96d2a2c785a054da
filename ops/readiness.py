"""Wait until every started worker has said that it is ready, and notice at once when one cannot be.

Only a status with the pid that was started counts: an older worker of the same name does not.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from ops.errors import CommandError
from ops.launch import log_tail
from ops.roster import RosterReader
from ops.stack import Part
from schemas.errors import UnavailableError
from schemas.worker import WorkerState, WorkerStatus
from streams.broker import Broker

POLL_MS = 200
WATCH_S = 0.1
RECONNECT_S = 0.5


class PartDiedError(CommandError):
    """A part ended or gave up while the stack was starting."""

    def __init__(self, part: Part, why: str) -> None:
        message = f"{part.name} {why}; its log: {part.log}"
        super().__init__(message, code="start_failed", details=log_tail(Path(part.log)))


async def watch(parts: Callable[[], Iterable[Part]]) -> None:
    """Return never; raise PartDiedError as soon as one of the parts has ended."""
    while True:
        for part in parts():
            if not part.process.is_running():
                raise PartDiedError(part, "ended at start")
        await asyncio.sleep(WATCH_S)


async def await_ready(
    broker: Broker, workers: Iterable[Part], on_ready: Callable[[Part, WorkerStatus], None], *, timeout_s: float
) -> None:
    """Return when all workers are ready, calling `on_ready` for each.

    Raises PartDiedError for a worker that reports a failure or is not ready in time.
    """
    waiting = {part.process.pid: part for part in workers}
    deadline = time.monotonic() + timeout_s
    while waiting:
        try:
            async with RosterReader(broker) as roster:
                while waiting:
                    _take(roster, waiting, on_ready)
                    _check_time(deadline, timeout_s, waiting)
                    if waiting:
                        await roster.poll(POLL_MS)
        except UnavailableError:
            _check_time(deadline, timeout_s, waiting)
            await asyncio.sleep(RECONNECT_S)


def _take(roster: RosterReader, waiting: dict[int, Part], on_ready: Callable[[Part, WorkerStatus], None]) -> None:
    for status in roster.workers():
        part = waiting.get(status.pid)
        if part is None or status.host != socket.gethostname():
            continue
        if status.state is WorkerState.FAILED:
            raise PartDiedError(part, f"cannot work: {status.reason or 'no reason given'}")
        if status.state is WorkerState.READY:
            del waiting[status.pid]
            on_ready(part, status)


def _check_time(deadline: float, timeout_s: float, waiting: dict[int, Part]) -> None:
    if waiting and time.monotonic() > deadline:
        part = next(iter(waiting.values()))
        raise PartDiedError(part, f"was not ready within {timeout_s:.0f} s")
