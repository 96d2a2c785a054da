"""The worker process of any pool: load → join → receive → handle → commit, and a drain at the end.

It knows nothing of what the pool does. Ready means loaded, assigned and warmed; the status that says so goes out with
every heartbeat. SIGTERM (the `stop` event) announces the end, serves what still comes for a while, lets work finish and
leaves the rest uncommitted for the next owner. A worker that is worse than its peers does the same, and comes back.
"""

from __future__ import annotations

import asyncio
import os
import socket
from contextlib import AsyncExitStack, suppress

import structlog

from schemas.errors import UnavailableError
from schemas.worker import Pool, WorkerState, WorkerStatus
from streams.broker import Broker
from streams.clock import now_ms
from streams.consumer import ConsumerStatistics, PoolConsumer
from streams.directory import Directory, Heartbeat
from streams.racing import first_of
from streams.settings import ConsumerLimits
from streams.topics import pool_group, pool_topic
from workers.handler import Handler
from workers.outbox import Outbox
from workers.peers import Peers
from workers.serving import DrainLimits, Serving
from workers.stall import StallWatch
from workers.standby import Standby
from workers.suspension import OutlierLimits

log = structlog.get_logger(__name__)

RETRY_S = 0.5
GOODBYE_S = 2.0  # to tell that we are gone; who is not told notices by our silence


class Worker:
    """One worker of one pool and colour; it reads the `directory`, without which it knows no peers.

    `outliers` says when it steps aside, None for never.
    """

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
        grace_s: float = 5.0,
        directory: Directory | None = None,
        outliers: OutlierLimits | None = None,
    ) -> None:
        self._broker = broker
        self._handler = handler
        self._outbox = outbox
        self._worker_id = worker_id
        self._colour = colour
        self._limits = limits
        self._drain_limits = DrainLimits(drain_s=drain_s, grace_s=grace_s)
        self._directory = directory
        self._peers = Peers(directory, handler.pool, colour, worker_id)
        self._consumer: PoolConsumer | None = None
        self._num_handled = 0
        self._started_ms = now_ms()
        self._reason = ""
        self._heartbeat = Heartbeat(outbox.producer, self.status, interval_s=heartbeat_s)
        self._standby = Standby(
            outliers or OutlierLimits(),
            status=self.status,
            pool=self._peers.all,
            probe=handler.probe,
            enter=self._enter,
            interval_s=heartbeat_s,
        )
        self._stall = StallWatch(limits.stuck_ms / 1000)
        self._may_step_aside = outliers is not None and directory is not None
        self.state = WorkerState.STARTING
        self.ready = asyncio.Event()

    async def run(self, stop: asyncio.Event) -> None:
        """Work until `stop` is set. Raises what ended the worker otherwise; its work is then left uncommitted."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._say_goodbye)
            await self._heartbeat.start()
            if self._directory is not None:
                stack.push_async_callback(self._directory.close)
                self._directory.start_soon()
            stack.push_async_callback(self._handler.stop)
            await self._handler.start()
            while not stop.is_set():
                async with Serving(self._make_consumer(), self._handler, on_handled=self._count) as serving:
                    if await serving.join(stop):
                        await serving.until(self._ready_until(serving.consumer, stop))
                        if stop.is_set():
                            await self._drain(serving)
                self._heartbeat.beat()  # the partitions are given up now
                if not stop.is_set():
                    await self._standby.until_fit(stop)
                    await self._until_reachable(stop)

    def status(self) -> WorkerStatus:
        """Return the worker as it sees itself."""
        snapshot = self._handler.snapshot()
        failure = snapshot.failure or (
            "no step of the engine while work waits" if self._stall.is_stalled(snapshot) else ""
        )
        consumer = self._consumer.statistics() if self._consumer else None
        if consumer is not None:
            self._note_metrics(consumer, snapshot.num_queued)
        return WorkerStatus(
            worker_id=self._worker_id,
            pool=self._handler.pool,
            colour=self._colour,
            state=WorkerState.FAILED if failure else self.state,
            updated_ms=now_ms(),
            started_ms=self._started_ms,
            host=socket.gethostname(),
            pid=os.getpid(),
            reason=failure or self._reason,
            model=snapshot.model,
            requests_in_flight=consumer.num_in_flight if consumer else 0,
            tokens_in_flight=snapshot.tokens_in_flight,
            tokens_queued=snapshot.tokens_queued,
            kv_usage=round(snapshot.kv_usage, 4),
            num_queued=snapshot.num_queued,
            num_handled=self._num_handled,
            step_ms=snapshot.step_ms,
            last_step_ms=snapshot.last_step_ms,
            num_partitions=consumer.num_partitions if consumer else 0,
            partitions=tuple(sorted(place.partition for place in consumer.partitions)) if consumer else (),
            lag=(consumer.lag or 0) if consumer else 0,
            request_ms=round(consumer.request_ms, 3) if consumer else 0.0,
            error_rate=round(consumer.error_rate, 4) if consumer else 0.0,
        )

    def _make_consumer(self) -> PoolConsumer:
        self._consumer = PoolConsumer(
            self._broker,
            [pool_topic(self._handler.pool, self._colour)],
            group=pool_group(self._handler.pool, self._colour),
            member=self._worker_id,
            limits=self._limits,
        )
        return self._consumer

    async def _ready_until(self, consumer: PoolConsumer, stop: asyncio.Event) -> None:
        """Become ready, and return when the worker has to stop or to step aside."""
        self._enter(WorkerState.READY)
        self.ready.set()
        log.info("ready", pool=self._handler.pool, started_in_ms=now_ms() - self._started_ms)
        suspended = (self._standby.until_suspended(),) if self._may_step_aside else ()
        await first_of(stop.wait(), *suspended, self._succeed(consumer))

    async def _succeed(self, consumer: PoolConsumer) -> None:
        """Take over from peers as soon as they have gone, not at the next heartbeat of the group."""
        while True:
            await self._peers.departed()
            await consumer.check_group()

    async def _until_reachable(self, stop: asyncio.Event) -> None:
        """Wait for a broker that is away: a worker that has worked before does not end for that."""
        while not stop.is_set():
            try:
                await self._broker.partitions(pool_topic(self._handler.pool, self._colour))
                return
            except UnavailableError as error:
                log.warning("return_delayed", reason=error.message)
            with suppress(TimeoutError):
                async with asyncio.timeout(RETRY_S):
                    await stop.wait()

    async def _drain(self, serving: Serving) -> None:
        self._enter(WorkerState.DRAINING)
        log.info("draining", num_in_flight=serving.consumer.statistics().num_in_flight)
        await serving.drain(self._drain_limits, self._peers.has_ready)

    async def _say_goodbye(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(GOODBYE_S):
                await self._heartbeat.stop()

    def _enter(self, state: WorkerState, reason: str = "") -> None:
        """Change the state and tell it at once."""
        self.state, self._reason = state, reason
        self._heartbeat.beat()

    def _count(self, num_handled: int) -> None:
        self._num_handled += num_handled

    def _note_metrics(self, consumer: ConsumerStatistics, num_queued: int) -> None:
        metrics = self._outbox.metrics
        if metrics is not None:
            num_waiting = consumer.num_waiting + num_queued
            metrics.num_requests_running.set(max(0, consumer.num_in_flight - num_waiting))
            metrics.num_requests_waiting.set(num_waiting)
            metrics.consumer_lag.set(consumer.lag or 0)


def default_worker_id(pool: Pool, colour: str) -> str:
    """Return a name for a worker that was given none."""
    return f"{pool}-{colour}-{socket.gethostname()}-{os.getpid()}"
