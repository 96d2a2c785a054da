"""Stop a stack: workers first, so that they can finish and say so, then Redis, then Kafka. Safe to repeat.

Only processes that are surely the stack's are signalled; see `ops.stack`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from typing import Protocol

import psutil

from ops.embedded import process
from ops.errors import CommandError
from ops.stack import Part, Process, Role, StackFolder, StackState, find_strays

WORKER_GRACE_S = 15.0
"""Beyond the worker's own `worker.drain_s`, whose default is shorter in dev.yaml."""
SERVER_GRACE_S = 20.0
OWNER_GRACE_S = 60.0
STRAY_GRACE_S = 5.0
POLL_S = 0.05


class Progress(Protocol):
    """What `ops.terminal.Reporter` offers here."""

    def step(self, name: str, text: str = "", seconds: float | None = None) -> None: ...


async def stop_stack(folder: StackFolder, progress: Progress, *, drain_s: float = WORKER_GRACE_S) -> bool:
    """Stop everything of a recorded stack and forget its state; False if nothing was recorded.

    A `gea up` that watches over the stack is asked to stop it first. Raises CommandError while another command starts
    or stops it.
    """
    state = folder.load()
    if state is None:
        return False
    if state.owner is not None and state.owner != Process.current():
        await _stop_owner(state.owner, progress)
    with folder.locked():
        state = folder.load()
        if state is not None:
            await stop_parts(state, progress, drain_s=drain_s)
            folder.forget()
    return True


async def stop_parts(state: StackState, progress: Progress, *, drain_s: float = WORKER_GRACE_S) -> None:
    """Stop the parts of a stack in their order, then whatever else carries the stack's id."""
    for role in Role:
        grace_s = drain_s if role is Role.WORKER else SERVER_GRACE_S
        parts = [part for part in state.parts if part.role is role]
        await asyncio.gather(*(_stop_part(part, grace_s, progress) for part in parts))
    await _stop_strays(find_strays(state.id, state.folder))


def purge(folder: StackFolder) -> None:
    """Remove the folder of a stack that does not run, data and logs included."""
    state = folder.load()
    if state is not None and state.is_running():
        raise CommandError(f"stack {folder.name!r} still runs: gea down --name {folder.name}")
    shutil.rmtree(folder.path, ignore_errors=True)


async def _stop_part(part: Part, grace_s: float, progress: Progress) -> None:
    was_running = part.process.is_running()
    started = time.monotonic()
    await process.stop_process(part.process.pid, part.process.created_at, grace_s=grace_s)
    if was_running:
        progress.step(part.name, "stopped", time.monotonic() - started)


async def _stop_owner(owner: Process, progress: Progress) -> None:
    """Ask the command that watches over the stack to stop it, and wait until it is gone."""
    if not owner.is_running():
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(owner.pid).send_signal(signal.SIGTERM)
    deadline = time.monotonic() + OWNER_GRACE_S
    while owner.is_running():
        if time.monotonic() > deadline:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(owner.pid).kill()
            deadline += STRAY_GRACE_S
        await asyncio.sleep(POLL_S)
    progress.step("gea up", f"pid {owner.pid} has stopped its stack")


async def _stop_strays(strays: list[Process]) -> None:
    for number, wait_s in ((signal.SIGTERM, STRAY_GRACE_S), (signal.SIGKILL, STRAY_GRACE_S)):
        left = [each for each in strays if each.is_running()]
        for each in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                psutil.Process(each.pid).send_signal(number)
        deadline = time.monotonic() + wait_s
        while any(each.is_running() for each in left) and time.monotonic() < deadline:  # noqa: ASYNC110 - no event
            await asyncio.sleep(POLL_S)
