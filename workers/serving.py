"""One stay of a worker in its pool's group: receive → handle → acknowledge, and the drain at its end.

It knows neither the pool nor why the stay ends. The invariants: what is not acknowledged when the stay ends is left
uncommitted for the next owner, and every step of the end is bounded in time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import structlog

from schemas.errors import ConfigError, GeaError
from streams.consumer import PoolConsumer
from streams.delivery import Delivery
from streams.racing import end_tasks, first_of, racing
from workers.handler import Handler

log = structlog.get_logger(__name__)

CANCEL_S = 5.0  # for handlers that were cancelled
HAND_OVER_CHECK_S = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainLimits:
    """How a stay ends: up to `grace_s` everything that still comes is served, up to `drain_s` in all what runs."""

    drain_s: float = 30.0
    grace_s: float = 5.0

    def __post_init__(self) -> None:
        if not self.drain_s > 0:
            raise ConfigError(f"worker.drain_s: {self.drain_s!r} is not allowed: above 0")
        if self.grace_s < 0:
            raise ConfigError(f"worker.grace_s: {self.grace_s!r} is not allowed: 0 or more")


class Serving:
    """Hands a consumer's batches to the handler, from `join` on. `async with` leaves; `until` raises what broke it."""

    def __init__(self, consumer: PoolConsumer, handler: Handler, *, on_handled: Callable[[int], None]) -> None:
        self.consumer = consumer
        self._handler = handler
        self._on_handled = on_handled
        self._batches: set[asyncio.Task[None]] = set()
        self._receiving: asyncio.Task[None] | None = None
        self._crash: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def until(self, work: Coroutine[Any, Any, Any]) -> None:
        """Serve until `work` is done, or nothing comes any more. Raises what ended the stay otherwise."""
        assert self._receiving is not None
        await first_of(work, beside=(self._receiving, self._crash))

    async def drain(self, limits: DrainLimits, has_peers: Callable[[], bool]) -> None:
        """Serve what still comes for a while, take no more, let work finish; with peers, let nobody wait behind us."""
        began = asyncio.get_running_loop().time()
        if has_peers():
            await self.until(self.consumer.idle(min(limits.grace_s, limits.drain_s)))
        left_s = max(0.0, limits.drain_s - (asyncio.get_running_loop().time() - began))
        await first_of(self.consumer.drain(left_s), self._until_somebody_waits(has_peers), beside=(self._crash,))

    async def join(self, stop: asyncio.Event) -> bool:
        """Join the group and begin to serve; False if `stop` came first, as it may while the broker is away."""
        async with racing(self.consumer.__aenter__(), stop.wait()) as (joining, _):
            if not joining.done():
                return False
            joining.result()
        self._receiving = asyncio.create_task(self._receive())
        return True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await end_tasks(self._receiving)
            for task in self._batches:
                task.cancel()
            if self._batches:
                await asyncio.wait(self._batches, timeout=CANCEL_S)
        finally:
            await self.consumer.close()

    async def _receive(self) -> None:
        async for batch in self.consumer.batches():
            task = asyncio.create_task(self._handle(batch))
            self._batches.add(task)
            task.add_done_callback(self._batches.discard)

    async def _handle(self, batch: Sequence[Delivery]) -> None:
        """The worker's edge: a fault that no record is to blame for ends the worker, not its records."""
        try:
            await self._handler.handle(batch)
            self._on_handled(len(batch))
        except Exception as error:
            code = error.code if isinstance(error, GeaError) else "internal"
            log.exception("batch_failed", code=code, num_records=len(batch))
            if not self._crash.done():
                self._crash.set_exception(error)

    def _num_unbegun(self) -> int:
        return self.consumer.statistics().num_behind + self._handler.snapshot().num_unbegun

    async def _until_somebody_waits(self, has_peers: Callable[[], bool]) -> None:
        """Wait until a peer would take at once what stands in our partitions: more than our work is worth."""
        while not (has_peers() and self._num_unbegun()):  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(HAND_OVER_CHECK_S)
        log.info("handed_over", num_in_flight=self.consumer.statistics().num_in_flight)
