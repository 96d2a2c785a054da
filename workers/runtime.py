"""The worker process of any pool: load → join → receive → handle → commit, and a drain at the end.

It knows nothing of what the pool does. Ready means loaded, assigned and warmed; the status that says so goes out with
every heartbeat. SIGTERM (the `stop` event) ends intake, lets work finish within `drain_s` and leaves the rest
uncommitted for the next owner.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from contextlib import AsyncExitStack

import structlog

from schemas.errors import GeaError
from schemas.worker import Pool, WorkerState, WorkerStatus
from streams.broker import Broker
from streams.clock import now_ms
from streams.consumer import PoolConsumer
from streams.delivery import Delivery
from streams.directory import Heartbeat
from streams.settings import ConsumerLimits
from streams.topics import pool_group, pool_topic
from workers.handler import Handler
from workers.outbox import Outbox

log = structlog.get_logger(__name__)


class Worker:
    """One worker of one pool and colour."""

    def __init__(
        self,
        broker: Broker,
        handler: Handler,
        outbox: Outbox,
        *,
        worker_id: str,
        colour: str,
        limits: ConsumerLimits,
        heartbeat_s: float = 1.0,
        drain_s: float = 30.0,
    ) -> None:
        self._broker = broker
        self._handler = handler
        self._outbox = outbox
        self._worker_id = worker_id
        self._colour = colour
        self._limits = limits
        self._heartbeat_s = heartbeat_s
        self._drain_s = drain_s
        self._consumer: PoolConsumer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._crash: asyncio.Future[None] | None = None
        self._heartbeat: Heartbeat | None = None
        self._num_handled = 0
        self._started_ms = now_ms()
        self.state = WorkerState.STARTING
        self.ready = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set. Raises what ended the worker otherwise; its work is then left uncommitted."""
        self._crash = asyncio.get_running_loop().create_future()
        async with AsyncExitStack() as stack:
            self._heartbeat = Heartbeat(self._outbox.producer, self.status, interval_s=self._heartbeat_s)
            await stack.enter_async_context(self._heartbeat)
            stack.push_async_callback(self._handler.stop)
            await self._handler.start()
            consumer = PoolConsumer(
                self._broker,
                [pool_topic(self._handler.pool, self._colour)],
                group=self._group(),
                member=self._worker_id,
                limits=self._limits,
            )
            self._consumer = await stack.enter_async_context(consumer)
            stack.push_async_callback(self._cancel_tasks)
            await self._until_stopped(consumer, stop)
            self._enter(WorkerState.DRAINING)
            log.info("draining", num_in_flight=consumer.statistics().num_in_flight)
            await self._drain(consumer)

    def status(self) -> WorkerStatus:
        """Return the worker as it sees itself."""
        snapshot = self._handler.snapshot()
        statistics = self._consumer.statistics() if self._consumer else None
        if self._outbox.metrics is not None and statistics is not None:
            self._outbox.metrics.num_requests_running.set(statistics.num_in_flight - statistics.num_waiting)
            self._outbox.metrics.num_requests_waiting.set(statistics.num_waiting + snapshot.num_queued)
            self._outbox.metrics.consumer_lag.set(statistics.lag or 0)
        return WorkerStatus(
            worker_id=self._worker_id,
            pool=self._handler.pool,
            colour=self._colour,
            state=self.state,
            updated_ms=now_ms(),
            started_ms=self._started_ms,
            host=socket.gethostname(),
            pid=os.getpid(),
            model=snapshot.model,
            requests_in_flight=statistics.num_in_flight if statistics else 0,
            tokens_in_flight=snapshot.tokens_in_flight,
            num_queued=snapshot.num_queued,
            num_handled=self._num_handled,
            step_ms=snapshot.step_ms,
            last_step_ms=snapshot.last_step_ms,
            num_partitions=statistics.num_partitions if statistics else 0,
            lag=(statistics.lag or 0) if statistics else 0,
        )

    def _group(self) -> str:
        return pool_group(self._handler.pool, self._colour)

    async def _until_stopped(self, consumer: PoolConsumer, stop: asyncio.Event) -> None:
        assert self._crash is not None
        receiving = asyncio.create_task(self._receive(consumer))
        stopping = asyncio.create_task(stop.wait())
        assigned = asyncio.create_task(self._become_ready(consumer))
        try:
            await asyncio.wait((receiving, stopping, self._crash), return_when=asyncio.FIRST_COMPLETED)
            for ended in (receiving, self._crash):
                if ended.done():
                    ended.result()
        finally:
            for task in (receiving, stopping, assigned):
                task.cancel()
            await asyncio.gather(receiving, stopping, assigned, return_exceptions=True)

    async def _drain(self, consumer: PoolConsumer) -> None:
        """Let work finish; what ended the worker in the meantime leaves nothing to wait for."""
        assert self._crash is not None
        draining = asyncio.create_task(consumer.drain(self._drain_s))
        try:
            await asyncio.wait((draining, self._crash), return_when=asyncio.FIRST_COMPLETED)
        finally:
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
        if self._crash.done():
            self._crash.result()

    async def _receive(self, consumer: PoolConsumer) -> None:
        async for batch in consumer.batches():
            task = asyncio.create_task(self._handle(batch))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _handle(self, batch: Sequence[Delivery]) -> None:
        """The worker's edge: a fault that no record is to blame for ends the worker, not its records."""
        try:
            await self._handler.handle(batch)
            self._num_handled += len(batch)
        except Exception as error:
            code = error.code if isinstance(error, GeaError) else "internal"
            log.exception("batch_failed", code=code, num_records=len(batch))
            if self._crash is not None and not self._crash.done():
                self._crash.set_exception(error)

    async def _become_ready(self, consumer: PoolConsumer) -> None:
        await consumer.joined()
        self._enter(WorkerState.READY)
        self.ready.set()
        log.info("ready", pool=self._handler.pool, started_in_ms=now_ms() - self._started_ms)

    def _enter(self, state: WorkerState) -> None:
        """Change the state and tell it at once."""
        self.state = state
        if self._heartbeat is not None:
            self._heartbeat.beat()

    async def _cancel_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)


def default_worker_id(pool: Pool, colour: str) -> str:
    """Return a name for a worker that was given none."""
    return f"{pool}-{colour}-{socket.gethostname()}-{os.getpid()}"
