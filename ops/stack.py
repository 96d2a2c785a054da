"""What runs on this machine under one name, as any later command can find it again.

A stack is a folder: `stack.json` (who runs where), `logs/`, and the data of its servers. The state is written
atomically before and after each part is started. Two things tell whose a process is: the pid with its creation time,
so that a pid that was given to somebody else is never signalled, and the stack's id, which every process of the stack
carries in its environment, so that a part whose start was cut short by SIGKILL is found too.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ops.errors import CommandError
from schemas.worker import Pool

if TYPE_CHECKING:
    import psutil

DEFAULT_NAME = "default"
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,40}")
ID_VARIABLE = "GEA_STACK_ID"
HOME_VARIABLE = "GEA_HOME"
STATE_VERSION = 1


class Role(StrEnum):
    """What a part does, in the order in which parts are stopped."""

    WORKER = "worker"
    """A worker of a pool."""
    REDIS = "redis"
    """The store."""
    KAFKA = "kafka"
    """The broker."""


class Process(msgspec.Struct, frozen=True, kw_only=True):
    """A process that is surely the one we mean."""

    pid: int
    created_at: float

    @classmethod
    def current(cls) -> Process:
        """Return this process."""
        import psutil

        return cls(pid=os.getpid(), created_at=psutil.Process().create_time())

    def is_running(self) -> bool:
        """Return whether the very process still runs."""
        from ops.embedded import process  # with psutil: half of what a health check may take, where no stack is asked

        return process.find(self.pid, self.created_at) is not None


class Part(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One started process of a stack. `address` is what clients connect to; `pool` and `colour` are a worker's."""

    role: Role
    name: str
    process: Process
    log: str
    address: str = ""
    pool: Pool | None = None
    colour: str = ""


class StackState(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A stack as it stands in `stack.json`. `owner` is the command that watches over it, None once it is detached."""

    id: str
    name: str
    folder: str
    version: int = STATE_VERSION
    owner: Process | None = None
    config: str = ""
    bootstrap: str = ""
    redis_url: str = ""
    broker: str = ""
    is_ready: bool = False
    parts: tuple[Part, ...] = ()

    def with_part(self, part: Part) -> StackState:
        """Return the state with one more part."""
        return msgspec.structs.replace(self, parts=(*self.parts, part))

    def is_running(self) -> bool:
        """Return whether anything of the stack still runs."""
        owner = self.owner is not None and self.owner.is_running()
        return owner or any(part.process.is_running() for part in self.parts)


def stacks_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return `$GEA_HOME`, else `$XDG_STATE_HOME/gea`, else `~/.local/state/gea`; it need not exist."""
    environ = os.environ if environ is None else environ
    if named := environ.get(HOME_VARIABLE):
        return Path(named).expanduser().absolute()
    base = environ.get("XDG_STATE_HOME")
    return (Path(base) if base else Path.home() / ".local" / "state") / "gea"


class StackFolder:
    """The folder of one stack: its state, its lock, its places. Nothing is made before it is needed."""

    def __init__(self, name: str = DEFAULT_NAME, base: Path | None = None) -> None:
        if not NAME_PATTERN.fullmatch(name):
            raise CommandError(f"stack name {name!r}: 1 to 41 letters, digits, '.', '_' or '-' are allowed")
        self.name = name
        self.path = (base or stacks_folder()) / name

    @property
    def state_file(self) -> Path:
        """Where the state stands."""
        return self.path / "stack.json"

    @property
    def logs(self) -> Path:
        """Where every part writes its log."""
        return self.path / "logs"

    def load(self) -> StackState | None:
        """Return the recorded state, None if there is none. Raises CommandError for a file that is no state."""
        try:
            state = msgspec.json.decode(self.state_file.read_bytes(), type=StackState)
        except FileNotFoundError:
            return None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CommandError(f"{self.state_file} is no stack file ({error}); remove it to go on") from error
        if state.version != STATE_VERSION:
            raise CommandError(f"{self.state_file} was written by another version of gea; remove it to go on")
        return state

    def save(self, state: StackState) -> None:
        """Write the state so that a reader sees the old or the new one, never a part."""
        self.path.mkdir(parents=True, exist_ok=True)
        part = self.state_file.with_suffix(f".{os.getpid()}.part")
        with part.open("wb") as file:
            os.fchmod(file.fileno(), 0o600)  # the address of Redis may hold a password
            file.write(msgspec.json.format(msgspec.json.encode(state)))
            file.flush()
            os.fsync(file.fileno())
        part.replace(self.state_file)

    def age_s(self) -> float:
        """Return the seconds since the folder last changed."""
        return time.time() - self.path.stat().st_mtime

    def forget(self) -> None:
        """Remove the state; the data stays."""
        self.state_file.unlink(missing_ok=True)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the stack's lock while parts are started or stopped; the kernel frees it with its holder.

        Raises CommandError if another command holds it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / ".lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                message = f"stack {self.name!r} is being started or stopped by another command; try again in a moment"
                raise CommandError(message) from None
            yield


def list_stacks(base: Path | None = None) -> list[StackFolder]:
    """Return the folders that hold a state, by name."""
    base = base or stacks_folder()
    files = sorted(base.glob("*/stack.json")) if base.is_dir() else []
    return [StackFolder(file.parent.name, base) for file in files if NAME_PATTERN.fullmatch(file.parent.name)]


def running_stack(name: str = DEFAULT_NAME, base: Path | None = None) -> StackState | None:
    """Return the state of the stack if it is up and ready, else None."""
    state = StackFolder(name, base).load()
    return state if state is not None and state.is_ready and state.is_running() else None


def find_strays(stack_id: str, folder: str = "") -> list[Process]:
    """Return the running processes that carry the stack's id in their environment, but never this one.

    Redis writes its title over its environment: it is known by its name and the folder of its data.
    """
    import psutil

    if not stack_id:
        return []
    found = []
    for each in psutil.process_iter(["pid", "create_time"]):
        try:
            is_ours = each.environ().get(ID_VARIABLE) == stack_id or _is_redis_of(each, folder)
            if is_ours and each.pid != os.getpid():
                found.append(Process(pid=each.pid, created_at=each.create_time()))
        except (psutil.Error, OSError):  # another user's, or just ended
            continue
    return found


def _is_redis_of(process: psutil.Process, folder: str) -> bool:
    is_redis = process.name().startswith(("redis-server", "valkey-server"))
    return bool(folder) and is_redis and Path(process.cwd()) == Path(folder).resolve() / "redis"
