"""Start a stack: Kafka, Redis, the router and the workers as own processes, ready when all of them say so.

Workers start while Kafka still does (they wait for it), so that loading weights and starting the broker overlap.
Whatever goes wrong, and when the start is cancelled, everything that was started is stopped again.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ops import readiness
from ops.down import stop_parts
from ops.embedded import (
    EmbeddedKafka,
    EmbeddedRedis,
    EmbeddedTansu,
    ServerError,
    ServerHandle,
    choose_broker,
    make_broker,
    process,
)
from ops.errors import CommandError
from ops.ingest import ingest
from ops.launch import (
    WorkerLaunch,
    default_environment,
    metrics_environment,
    spawn_worker,
    worker_environment,
    worker_name,
)
from ops.stack import ID_VARIABLE, Part, Process, Role, StackFolder, StackState
from ops.terminal import Reporter, finish
from schemas.worker import Pool, WorkerStatus
from streams.topics import DOCUMENTS, topic_specs
from workers.connect import kafka_broker
from workers.settings import Settings

PORT_TRIES = 3
READY_TIMEOUT_S = 240.0


class PortTakenError(Exception):
    """Somebody else took the broker's port between choice and bind: start again with another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a stack shall consist of. `kafka` and `redis` name existing servers; None: embedded ones.

    `documents` are Markdown folders or files that are published at the start. `dies_with_us` ties every process to this
    one, so that nothing stays even if it is killed.
    """

    config: Path
    settings: Settings
    kafka: str | None = None
    redis: str | None = None
    replicas: Mapping[Pool, int] = field(default_factory=dict)
    colour: str = "blue"
    documents: Sequence[Path] = ()
    dies_with_us: bool = False
    ready_timeout_s: float = READY_TIMEOUT_S

    def num_workers(self, pool: Pool) -> int:
        """Return how many workers of a pool are started."""
        return self.replicas.get(pool, self.settings.resources.of(pool).replicas)


async def start_stack(folder: StackFolder, plan: Plan, reporter: Reporter) -> StackState:
    """Start everything and return when all of it is ready. Safe to cancel: nothing is left running then.

    Raises CommandError (already running, a part died, not ready in time) or EmbeddedError.
    """
    with folder.locked():
        await _clear_stale(folder, reporter)
        for _ in range(PORT_TRIES - 1):
            try:
                return await _Start(folder, plan, reporter).run()
            except PortTakenError:
                reporter.note("another program took the broker's port; starting again with another")
        return await _Start(folder, plan, reporter).run()


async def _clear_stale(folder: StackFolder, reporter: Reporter) -> None:
    """Make room for a new stack: what an interrupted start left is stopped, a running stack is refused."""
    state = folder.load()
    if state is not None:
        if state.is_running() and (state.is_ready or (state.owner and state.owner.is_running())):
            raise CommandError(
                f"stack {folder.name!r} is running already: see `gea status`, stop it with `gea down`, "
                "or start another with --name",
                code="already_running",
            )
        reporter.note(f"clearing up after stack {folder.name!r}, which was not stopped in order")
        await stop_parts(state, reporter)
        folder.forget()
    shutil.rmtree(folder.logs, ignore_errors=True)


class _Start:
    """One attempt to start a stack."""

    def __init__(self, folder: StackFolder, plan: Plan, reporter: Reporter) -> None:
        self._folder, self._plan, self._reporter = folder, plan, reporter
        self._began = time.monotonic()
        self._published = asyncio.Event()
        self._state = StackState(
            id=secrets.token_hex(16),
            name=folder.name,
            folder=str(folder.path),
            owner=Process.current(),
            config=str(plan.config),
            bootstrap=plan.kafka or f"127.0.0.1:{process.free_ports(1)[0]}",
            redis_url=plan.redis or "",
            broker=f"Kafka at {plan.kafka}" if plan.kafka else "",
        )

    async def run(self) -> StackState:
        """Start, wait, and return the state; stop everything if that fails."""
        os.environ[ID_VARIABLE] = self._state.id  # servers inherit it; see ops.stack
        self._save()
        try:
            with self._reporter.waiting("starting Kafka, Redis and the workers; loading the models"):
                await self._start_watched()
        except BaseException as error:
            await finish(self._give_up())
            if isinstance(error, BaseExceptionGroup):
                raise _first(error) from None
            raise
        self._state = msgspec.structs.replace(self._state, is_ready=True)
        self._save()
        return self._state

    async def _start_watched(self) -> None:
        """Start everything; fail as soon as a part ends."""
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(readiness.watch(lambda: self._state.parts))
            await self._start_all()
            watcher.cancel()

    async def _start_all(self) -> None:
        await self._start_redis()  # a tenth of a second, and the workers need its port
        async with asyncio.TaskGroup() as group:
            group.create_task(self._start_broker())
            group.create_task(self._start_workers())
        workers = [part for part in self._state.parts if part.role is Role.WORKER]
        async with kafka_broker(self._settings(), client_id="gea-up") as broker:
            await readiness.await_ready(broker, workers, self._report_ready, timeout_s=self._plan.ready_timeout_s)

    async def _start_broker(self) -> None:
        if self._plan.kafka is None:
            await self._start_kafka()
        began = time.monotonic()
        settings = self._settings()
        async with kafka_broker(settings, client_id="gea-up") as broker:
            specs = topic_specs(settings.kafka.partitions, settings.kafka.replication, (self._plan.colour,))
            # Workers begin when the topics of the request path exist: by then the knowledge stands in its own, so that
            # a retrieval worker that says it is ready has read it.
            created = list(await broker.create_topics([spec for spec in specs if spec.name == DOCUMENTS]))
            if self._plan.documents:
                report = await ingest(broker, self._plan.documents)
                self._reporter.step("knowledge", report.summary(), time.monotonic() - began)
            self._published.set()
            began = time.monotonic()
            created += await broker.create_topics(specs)
            self._reporter.step("topics", f"{len(created)} created of {len(specs)}", time.monotonic() - began)

    async def _start_kafka(self) -> None:
        choice = choose_broker()
        if choice.is_fallback:
            self._reporter.warn(choice.reason)
        server = make_broker(
            choice,
            self._folder.path / "kafka",
            port=int(self._state.bootstrap.rpartition(":")[2]),
            log_folder=self._folder.logs,
            detached=not self._plan.dies_with_us,
        )
        await self._start_server(server, Role.KAFKA)

    async def _start_redis(self) -> None:
        if self._plan.redis is None:
            server = EmbeddedRedis(
                self._folder.path / "redis", log_folder=self._folder.logs, detached=not self._plan.dies_with_us
            )
            await self._start_server(server, Role.REDIS)

    async def _start_server(self, server: EmbeddedKafka | EmbeddedTansu | EmbeddedRedis, role: Role) -> None:
        began = time.monotonic()
        try:
            handle = await server.start()
        except ServerError as error:
            if role is Role.KAFKA and process.is_port_taken(error.log, 0):
                raise PortTakenError from error
            raise
        self._record(_server_part(handle, role))
        key = {"redis_url": handle.address} if role is Role.REDIS else {"broker": handle.name}
        self._state = msgspec.structs.replace(self._state, **key)
        self._reporter.step(handle.name, handle.address, time.monotonic() - began)

    async def _start_workers(self) -> None:
        models = await default_environment(self._plan.settings, self._reporter.note)
        addresses = {ID_VARIABLE: self._state.id, "GEA_KAFKA_BOOTSTRAP": self._state.bootstrap}
        addresses |= {"GEA_REDIS_URL": self._state.redis_url, "GEA_REDIS_STATE_URL": "null"}
        started = itertools.count()
        # The slowest to load goes first.
        for pool in (Pool.GENERATION, Pool.INTENT, Pool.ROUTER, Pool.RETRIEVAL):
            if pool is Pool.RETRIEVAL and self._plan.kafka is not None:
                await self._published.wait()  # on a broker that has run before, the topics may exist already
            environ = worker_environment(pool, self._plan.settings, models | addresses)
            for number in range(1, self._plan.num_workers(pool) + 1):
                is_shared = self._plan.kafka is not None
                name = worker_name(pool, number, stack=self._folder.name, is_shared_broker=is_shared)
                launch = WorkerLaunch(
                    pool=pool,
                    name=name,
                    colour=self._plan.colour,
                    config=self._plan.config,
                    log=self._folder.logs / f"{pool}-{number}.log",
                    environ=environ | metrics_environment(self._plan.settings, next(started)),
                    dies_with_us=self._plan.dies_with_us,
                )
                self._record(spawn_worker(launch))

    def _settings(self) -> Settings:
        kafka = msgspec.structs.replace(self._plan.settings.kafka, bootstrap=self._state.bootstrap)
        return msgspec.structs.replace(self._plan.settings, kafka=kafka)

    def _report_ready(self, part: Part, status: WorkerStatus) -> None:
        self._reporter.step(part.name, status.model or "ready", time.monotonic() - self._began)

    def _record(self, part: Part) -> None:
        self._state = self._state.with_part(part)
        self._save()

    def _save(self) -> None:
        self._folder.save(self._state)

    async def _give_up(self) -> None:
        if self._state.parts:
            self._reporter.note("stopping what was started")
        await stop_parts(self._state, self._reporter, drain_s=2.0)
        self._folder.forget()


def _server_part(handle: ServerHandle, role: Role) -> Part:
    return Part(
        role=role,
        name=handle.name,
        process=Process(pid=handle.pid, created_at=handle.created_at),
        log=str(handle.log),
        address=handle.address,
    )


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the failure that began it all; the others followed from it."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
