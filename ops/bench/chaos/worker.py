"""A worker process of the bench: the production worker, with two pools replaced by stand-ins, and a census of itself.

The census says every half second, in a file, which tasks live on the event loop and how full the stage is: so that at
the end a task or a sequence that nobody freed is seen from outside.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from ops.bench.chaos.annotators import STAND_INS, build_or_stand_in
from schemas.worker import Pool
from streams.broker import Broker
from streams.cancellations import Cancellations
from streams.clock import now_ms
from workers.__main__ import main
from workers.build import preload
from workers.handler import Handler
from workers.outbox import Outbox
from workers.settings import Settings

CENSUS_S = 0.5
CENSUS_VARIABLE = "BENCH_CENSUS"
PR_SET_PDEATHSIG = 1


def run(arguments: list[str], environ: Mapping[str, str], log: str) -> None:
    """Be a worker until killed or asked to stop: the body of a forked process. Exits with the worker's code."""
    _die_with_parent()
    with Path(log).open("ab", buffering=0) as out:
        os.dup2(out.fileno(), sys.stdout.fileno())
        os.dup2(out.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environ)
    sys.exit(main(arguments, build=_build, load=_load))


async def _build(
    pool: Pool,
    settings: Settings,
    broker: Broker,
    outbox: Outbox,
    stack: AsyncExitStack,
    *,
    colour: str,
    cancellations: Cancellations,
) -> Handler:
    handler = await build_or_stand_in(pool, settings, broker, outbox, stack, colour=colour, cancellations=cancellations)
    path = Path(os.environ[CENSUS_VARIABLE])
    census = asyncio.create_task(_take_census(handler, path), name="census")
    stack.callback(census.cancel)
    return handler


def _load(pool: Pool, settings: Settings) -> None:
    if pool not in STAND_INS:
        preload(pool, settings)


async def _take_census(handler: Handler, path: Path) -> None:
    part = path.with_suffix(".part")
    while True:
        tasks = Counter(_name(task) for task in asyncio.all_tasks())
        snapshot = handler.snapshot()
        seen = {
            "at_ms": now_ms(),
            "tasks": dict(tasks),
            "tokens_in_flight": snapshot.tokens_in_flight,
            "num_queued": snapshot.num_queued,
        }
        part.write_text(json.dumps(seen))
        part.replace(path)
        await asyncio.sleep(CENSUS_S)


def _name(task: asyncio.Task[object]) -> str:
    return getattr(task.get_coro(), "__qualname__", "") or task.get_name()


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the one that forked it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
