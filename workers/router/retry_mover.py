"""Brings retried requests back: a record of `gea.retry.*` waits until it is due and then returns to its target.

Each delay has a topic, a consumer group and a bound of its own, so that a long delay never stands before a short one;
waiting blocks no polling. Knows when and where to, not why. The invariants: a record is acknowledged only after its
copy is; it returns to one of our pool topics or is put aside; none waits longer than its topic's delay. A request
whose time is over, or that was cancelled, returns at once: its pool ends it, and knows what was published. A mover
that dies leaves its records to the next one (at least once; claims make the double harmless).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import structlog

from schemas.envelope import RoutedRequest
from schemas.errors import DecodeError, GeaError, InternalError, InvalidRequestError, UnavailableError
from streams.broker import Broker
from streams.cancellations import Cancellations
from streams.clock import now_ms
from streams.consumer import PoolConsumer
from streams.delivery import Delivery
from streams.racing import end_tasks
from streams.retry import RetryOrder, read_order, without_order
from streams.settings import ConsumerLimits
from streams.telemetry import bind_request
from streams.topics import RETRY_DELAYS_S, is_pool_topic, retry_group
from workers.failure_policy import JITTER
from workers.handler import decode_routed, epoch_of, refuse_record
from workers.outbox import Outbox, until_sent
from workers.path import partition_key

REJOIN_S = 3.0  # between attempts to join while the broker is away or a topic is missing
MAX_SLEEP_S = 10.0  # a wall clock that was set is noticed after it
SEND_S = 5.0  # what is being moved at the stop may finish within it

log = structlog.get_logger(__name__)


class Clock(Protocol):
    """The wall clock, and waiting by it."""

    def now_ms(self) -> int:
        """Return the Unix time in milliseconds."""
        ...

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        """Return when `event` is set or the time is up."""
        ...


class WallClock:
    """The real one."""

    def now_ms(self) -> int:
        """Return the Unix time in milliseconds."""
        return now_ms()

    async def wait(self, event: asyncio.Event, timeout_s: float) -> None:
        """Return when `event` is set or the time is up."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()


class RetryMover:
    """Moves due retries for one router. `max_in_flight` is how many wait at once, per delay."""

    def __init__(
        self,
        broker: Broker,
        outbox: Outbox,
        *,
        member: str,
        max_in_flight: int = 500,
        cancellations: Cancellations | None = None,
        clock: Clock | None = None,
        commit_interval_ms: int = 1_000,
    ) -> None:
        self._broker = broker
        self._outbox = outbox
        self._member = member
        self._limits = ConsumerLimits(
            batch_size=1,
            max_wait_ms=0,
            max_in_flight=max_in_flight,
            window=max_in_flight,
            commit_interval_ms=commit_interval_ms,
        )
        self._cancellations = cancellations or Cancellations()
        self._clock = clock or WallClock()
        self._consuming: list[asyncio.Task[None]] = []
        self._waiting: set[asyncio.Task[Any]] = set()
        self._moving: set[asyncio.Task[Any]] = set()
        self.num_moved = 0

    @property
    def num_waiting(self) -> int:
        """Return how many records wait here until they are due."""
        return len(self._waiting)

    async def start(self) -> None:
        """Begin to consume; a broker that is away is waited for in the background."""
        self._consuming = [asyncio.create_task(self._consume(topic)) for topic in RETRY_DELAYS_S]

    async def stop(self) -> None:
        """Leave what waits to the next mover, finish what is being moved within a limit. Idempotent."""
        if self._moving:
            await asyncio.wait(self._moving, timeout=SEND_S)
        await end_tasks(*self._consuming)

    async def _consume(self, topic: str) -> None:
        """Consume one topic for ever, whatever happens to the consumer."""
        while True:
            try:
                if await self._broker.partitions(topic):
                    await self._consume_once(topic)
                else:
                    log.warning("retry_topic_missing", topic=topic, remedy="`gea topics apply` makes it")
            except UnavailableError as error:
                log.warning("retry_consumer_unavailable", topic=topic, reason=error.message)
            except Exception:
                log.exception("retry_consumer_failed", topic=topic)
            await asyncio.sleep(REJOIN_S)

    async def _consume_once(self, topic: str) -> None:
        consumer = PoolConsumer(
            self._broker, [topic], group=retry_group(topic), member=self._member, limits=self._limits
        )
        async with consumer, asyncio.TaskGroup() as tasks:
            async for batch in consumer.batches():
                for delivery in batch:
                    delivery.attach(tasks.create_task(self._take(delivery)))

    async def _take(self, delivery: Delivery) -> None:
        try:
            routed = decode_routed(delivery.record)
        except (DecodeError, InvalidRequestError) as error:
            await refuse_record(self._outbox, delivery, error)
            return
        with bind_request(routed.request_id, traceparent=routed.traceparent):
            try:
                order = read_order(delivery.record.headers)
                await self._check_target(order)
                await self._until_due(delivery, routed, order)
                await self._move(delivery, routed, order)
            except InvalidRequestError as error:
                await self._put_aside(delivery, routed, error)
            except Exception as error:
                log.exception("retry_failed")
                await self._put_aside(delivery, routed, InternalError(f"{type(error).__name__}: {error}"))

    async def _check_target(self, order: RetryOrder) -> None:
        """Raise InvalidRequestError unless the target is a pool's topic that exists."""
        is_ours = is_pool_topic(order.target)
        if not is_ours or not await until_sent(lambda: self._broker.partitions(order.target)):
            raise InvalidRequestError(f"header target: {order.target!r} is no topic of a pool here", field="target")

    async def _until_due(self, delivery: Delivery, routed: RoutedRequest, order: RetryOrder) -> None:
        """Wait until the order is due, the deadline has come, the request is cancelled or its readers are gone."""
        longest_ms = round(RETRY_DELAYS_S[delivery.record.topic] * 1000 * (1 + JITTER))
        due_ms = min(order.not_before_ms, routed.deadline_ms, self._clock.now_ms() + longest_ms)
        lease_s = routed.request.reader_lease_s
        watching = self._cancellations.watch(routed.request_id, routed.tenant, lease_s=lease_s)
        with _member_of(self._waiting), watching as cancelled:
            while (left_ms := due_ms - self._clock.now_ms()) > 0 and not cancelled.is_set():
                await self._clock.wait(cancelled, min(left_ms / 1000, MAX_SLEEP_S))

    async def _move(self, delivery: Delivery, routed: RoutedRequest, order: RetryOrder) -> None:
        """Produce the record again as it is, then acknowledge it."""
        record, placement = delivery.record, self._outbox.placement
        with _member_of(self._moving):
            await until_sent(
                lambda: self._outbox.producer.send(
                    order.target,
                    record.value,
                    key=partition_key(routed),
                    headers=without_order(record.headers),
                    partition=placement.partition(order.target, routed) if placement is not None else None,
                )
            )
            log.info("retry_moved", target=order.target, attempt=routed.attempt, hop=routed.hop)
            self.num_moved += 1
            delivery.done()

    async def _put_aside(self, delivery: Delivery, routed: RoutedRequest, error: GeaError) -> None:
        """Dead-letter the record and end its request, in an epoch above that of the run that failed."""
        await self._outbox.dead_letter(delivery.record, error)
        epoch = epoch_of(delivery, routed.hop)
        await self._outbox.end(routed.reply, routed.request_id, error, epoch=epoch)
        delivery.done()


@contextmanager
def _member_of(tasks: set[asyncio.Task[Any]]) -> Iterator[None]:
    """Have the running task in a set for a while."""
    task = asyncio.current_task()
    assert task is not None
    tasks.add(task)
    try:
        yield
    finally:
        tasks.discard(task)
