"""The bench's worker processes: forked from a server that has loaded everything, so that one starts in milliseconds.

Each is a process of its own and is killed as one. Whoever dies unasked is noticed (`unexpected`) and started again, as
an orchestrator would.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from ops.bench.chaos import worker
from schemas.worker import Pool

POLL_S = 0.02
READY_LOG = b'"ready"'
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(slots=True, kw_only=True)
class WorkerProcess:
    """One process. `is_asked` says that its end is ours: a kill or a stop."""

    pool: Pool
    name: str
    process: BaseProcess
    log: Path
    census_path: Path
    is_asked: bool = False

    @property
    def is_alive(self) -> bool:
        """Return whether it runs."""
        return self.process.is_alive()

    def census(self) -> dict[str, Any] | None:
        """Return what it last said about itself, None if nothing yet."""
        try:
            found = json.loads(self.census_path.read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


@dataclass(slots=True)
class Workers:
    """All worker processes by name. `modules` are loaded once, before the first fork."""

    folder: Path
    config: Path
    environ: Mapping[str, str]
    modules: tuple[str, ...] = ()
    running: dict[str, WorkerProcess] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    num_started: int = 0
    _context: ForkServerContext = field(default_factory=lambda: multiprocessing.get_context("forkserver"))

    def prepare(self) -> None:
        """Name what the fork server loads; it starts with the first worker."""
        self._context.set_forkserver_preload([worker.__name__, *self.modules])

    def start(self, pool: Pool, name: str, environ: Mapping[str, str] | None = None) -> WorkerProcess:
        """Start a worker under a lasting name; it joins by itself."""
        self.num_started += 1
        log = self.folder / f"{name}.log"
        census = self.folder / f"{name}.census"
        census.unlink(missing_ok=True)
        arguments = [pool.value, "--config", str(self.config), "--name", name]
        variables = {**self.environ, **(environ or {}), worker.CENSUS_VARIABLE: str(census)}
        process = self._context.Process(
            target=worker.run, args=(arguments, variables, str(log)), name=name, daemon=True
        )
        process.start()
        made = WorkerProcess(pool=pool, name=name, process=process, log=log, census_path=census)
        self.running[name] = made
        return made

    async def start_all(self, names: Mapping[str, Pool], within_s: float) -> WorkerProcess | None:
        """Start workers and wait for each in turn; return the first that did not become ready in time."""
        started = [self.start(pool, name) for name, pool in names.items()]
        for each in started:
            if not await self.ready(each, within_s):
                return each
        return None

    def of(self, pool: Pool) -> list[WorkerProcess]:
        """Return the workers of a pool that run and are not asked to stop."""
        return [each for each in self.running.values() if each.pool is pool and each.is_alive and not each.is_asked]

    def kill(self, one: WorkerProcess) -> None:
        """`kill -9`."""
        one.is_asked = True
        if one.process.pid is not None and one.is_alive:
            os.kill(one.process.pid, signal.SIGKILL)

    async def stop(self, one: WorkerProcess, within_s: float) -> int | None:
        """SIGTERM; return the exit code, None (and a kill) if it does not end in time."""
        one.is_asked = True
        if one.process.pid is not None and one.is_alive:
            os.kill(one.process.pid, signal.SIGTERM)
        if await self.gone(one, within_s):
            return one.process.exitcode
        self.kill(one)
        await self.gone(one, 5)
        return None

    async def gone(self, one: WorkerProcess, within_s: float) -> bool:
        """Wait until a process has ended."""
        deadline = time.monotonic() + within_s
        while one.is_alive and time.monotonic() < deadline:  # noqa: ASYNC110 - a process of the fork server sends no event
            await asyncio.sleep(POLL_S)
        return not one.is_alive

    async def ready(self, one: WorkerProcess, within_s: float) -> bool:
        """Wait until a worker is loaded and has joined: it has said so in its log."""
        deadline = time.monotonic() + within_s
        while one.is_alive and time.monotonic() < deadline:
            if one.log.exists() and one.log.read_bytes().rpartition(READY_LOG)[1]:
                return True
            await asyncio.sleep(POLL_S)
        return False

    def revive(self) -> list[WorkerProcess]:
        """Start again whoever ended unasked, and remember it."""
        dead = [each for each in self.running.values() if not each.is_alive and not each.is_asked]
        for each in dead:
            self.unexpected.append(f"{each.name}: exit code {each.process.exitcode}, see {each.log}")
        return [self.start(each.pool, each.name) for each in dead]

    async def close(self) -> None:
        """End every process."""
        for each in self.running.values():
            self.kill(each)
        for each in self.running.values():
            await self.gone(each, 5)


def bare_environment() -> dict[str, str]:
    """Return our environment without GEA's variables, since the bench's file says it all, and with one thread each."""
    return {key: value for key, value in os.environ.items() if not key.startswith("GEA_")} | THREADS
