"""Start and stop one server process, and know it again later.

A server leads a session of its own, so Ctrl-C at a terminal reaches only the command that started it, which then stops
its servers in its own order. A handle carries the creation time beside the pid: a pid that was given to another
process is never signalled.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from ops.embedded.errors import ServerError

POLL_S = 0.02
STOP_GRACE_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerHandle:
    """A running server as another process can find it again; plain values, see `to_dict`."""

    name: str
    """Name and version, for instance `Apache Kafka 4.4.0`."""
    address: str
    """What clients connect to: `host:port` of a broker, the URL of a Redis."""
    port: int
    pid: int
    created_at: float
    """Unix seconds at which the operating system made the process."""
    log: Path

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready values; `from_dict` reads them back."""
        return asdict(self) | {"log": str(self.log)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> ServerHandle:
        return cls(**(values | {"log": Path(values["log"])}))


def spawn(
    command: Sequence[str], *, log: Path, die_with_parent: bool, environ: Mapping[str, str] | None = None
) -> tuple[int, float]:
    """Start `command` as leader of a new session, its output appended to `log`; return pid and creation time.

    With `die_with_parent` the kernel ends it when the calling thread's process is killed (Linux with `setpriv`).
    `environ` is its whole environment; ours if None.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    setpriv = shutil.which("setpriv") if die_with_parent else None
    argv = [setpriv, "--pdeathsig", "TERM", "--", *command] if setpriv else list(command)
    pid = os.posix_spawn(
        argv[0],
        argv,
        os.environ if environ is None else environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigdef=[signal.SIGPIPE, signal.SIGINT],  # Python ignores the first; a shell's background job the second
    )
    return pid, psutil.Process(pid).create_time()


def find(pid: int, created_at: float) -> psutil.Process | None:
    """Return the process if it is the very one and still runs."""
    try:
        process = psutil.Process(pid)
        same = abs(process.create_time() - created_at) < 1.0 and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return None
    return process if same else None


def is_running(handle: ServerHandle) -> bool:
    return find(handle.pid, handle.created_at) is not None


async def stop(handle: ServerHandle, *, grace_s: float = STOP_GRACE_S) -> None:
    """Ask the server to end (SIGTERM), kill its process group after `grace_s`; a server that is gone is no error."""
    await stop_process(handle.pid, handle.created_at, grace_s=grace_s)


async def stop_process(pid: int, created_at: float, *, grace_s: float = STOP_GRACE_S) -> None:
    """As `stop`, for a bare pid. Reaps the process if it is a child of the caller."""
    for signal_number, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, 5.0)):
        if find(pid, created_at) is None:
            break
        try:
            os.killpg(pid, signal_number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + wait_s
        while find(pid, created_at) is not None and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(POLL_S)
    reap(pid)


def reap(pid: int) -> None:
    """Collect an ended child, so that no zombie stays; nothing happens for a process that is not a child."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return


async def wait_ready(
    name: str, pid: int, created_at: float, ping: Callable[[], Awaitable[bool]], *, log: Path, timeout_s: float
) -> None:
    """Return once `ping` answers true; raise `ServerError` when the process ends first or the time is over."""
    deadline = time.monotonic() + timeout_s
    while not await ping():
        if find(pid, created_at) is None:
            reap(pid)
            raise ServerError(name, f"ended at start ({last_line(log)})", log)
        if time.monotonic() > deadline:
            raise ServerError(name, f"was not ready within {timeout_s:.0f} s ({last_line(log)})", log)
        await asyncio.sleep(POLL_S)


def last_line(log: Path) -> str:
    """Return the last line of a log that is worth showing."""
    if not log.exists():
        return "no output"
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    failures = [line for line in lines if "ERROR" in line or "FATAL" in line or "Exception" in line]
    return (failures or lines or ["no output"])[-1][:300]


def free_ports(count: int) -> list[int]:
    """Return free TCP ports of the loopback address, all different.

    They are free now, not reserved: a starter must be ready to try again with others.
    """
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()


def is_port_taken(log: Path, start: int) -> bool:
    """Tell from the log, read from byte `start`, whether the server ended because its port was in use."""
    if not log.exists():
        return False
    text = log.read_bytes()[start:].decode(errors="replace")
    return "already in use" in text
