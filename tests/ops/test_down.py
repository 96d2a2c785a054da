"""Stopping takes the stack's own processes, in order, and nothing else; it may be asked for twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from ops.down import purge, stop_parts, stop_stack
from ops.errors import CommandError
from ops.stack import ID_VARIABLE, Part, Process, Role, StackFolder, StackState

READY_THEN_WAIT = "print(flush=True); input()"
Spawn = Callable[..., subprocess.Popen[bytes]]


class Steps:
    """Remembers what was reported."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def step(self, name: str, text: str = "", seconds: float | None = None) -> None:
        self.names.append(name)


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    """Start Python code as the leader of its own session; it has printed a line when this returns."""
    started: list[subprocess.Popen[bytes]] = []

    def start(code: str = READY_THEN_WAIT, *, stack_id: str = "") -> subprocess.Popen[bytes]:
        environ = {key: value for key, value in os.environ.items() if key != ID_VARIABLE}
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environ | ({ID_VARIABLE: stack_id} if stack_id else {}),
            start_new_session=True,
        )
        started.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield start
    for process in started:
        with process:
            process.kill()


def identity(process: subprocess.Popen[bytes]) -> Process:
    return Process(pid=process.pid, created_at=psutil.Process(process.pid).create_time())


def part(role: Role, process: Process) -> Part:
    return Part(role=role, name=role.value, process=process, log="x.log")


def state(*parts: Part, stack_id: str = "", owner: Process | None = None) -> StackState:
    return StackState(id=stack_id, name="one", folder="", parts=parts, owner=owner, is_ready=True)


async def test_workers_end_before_redis_and_redis_before_kafka(spawn: Spawn) -> None:
    steps = Steps()
    roles = (Role.KAFKA, Role.REDIS, Role.WORKER)
    await stop_parts(state(*(part(role, identity(spawn())) for role in roles)), steps)
    assert steps.names == ["worker", "redis", "kafka"]


async def test_pid_of_somebody_else_is_left_alone(spawn: Spawn) -> None:
    process = spawn()
    reused = msgspec.structs.replace(identity(process), created_at=identity(process).created_at - 60)
    await stop_parts(state(part(Role.WORKER, reused)), Steps())
    assert process.poll() is None


async def test_worker_that_ignores_the_request_is_killed_after_its_time(spawn: Spawn) -> None:
    deaf = spawn("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); input()")
    who = identity(deaf)
    await stop_parts(state(part(Role.WORKER, who)), Steps(), drain_s=0.1)
    assert not who.is_running()


async def test_unrecorded_process_of_the_stack_is_stopped_too(spawn: Spawn) -> None:
    stray, other = spawn(stack_id="id-of-this-stack"), spawn(stack_id="id-of-another-stack")
    await stop_parts(state(stack_id="id-of-this-stack"), Steps())
    assert stray.wait() == -signal.SIGTERM
    assert other.poll() is None


async def test_down_asks_the_watching_command_first(spawn: Spawn, tmp_path: Path) -> None:
    folder = StackFolder("one", tmp_path)
    owner, worker = spawn(), spawn()
    folder.save(state(part(Role.WORKER, identity(worker)), owner=identity(owner)))
    steps = Steps()
    assert await stop_stack(folder, steps)
    assert steps.names == ["gea up", "worker"]
    assert owner.wait() == -signal.SIGTERM


async def test_down_twice_is_no_error(spawn: Spawn, tmp_path: Path) -> None:
    folder = StackFolder("one", tmp_path)
    folder.save(state(part(Role.WORKER, identity(spawn()))))
    assert await stop_stack(folder, Steps())
    assert not await stop_stack(folder, Steps())
    assert folder.load() is None


async def test_down_waits_for_nobody_who_starts_the_stack(spawn: Spawn, tmp_path: Path) -> None:
    folder = StackFolder("one", tmp_path)
    folder.save(state())
    with folder.locked(), pytest.raises(CommandError, match="another command"):
        await stop_stack(StackFolder("one", tmp_path), Steps())


def test_purge_refuses_a_stack_that_runs(spawn: Spawn, tmp_path: Path) -> None:
    folder = StackFolder("one", tmp_path)
    process = spawn()
    folder.save(state(part(Role.WORKER, identity(process))))
    with pytest.raises(CommandError, match="still runs"):
        purge(folder)
    process.kill()
    process.wait()
    purge(folder)
    assert not folder.path.exists()
