"""A pool's consumer: batches of records out, acknowledgements back, over as many stays in the group as it takes.

It hands out what a `Membership` receives, and replaces a membership that the watchdog finds stuck. The invariants: at
most `max_in_flight` records are received and unfinished, and less than twice `window` offsets per partition, by pausing
and never by ceasing to poll; nothing is handed out while another member may own it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

import structlog

from schemas.errors import UnavailableError
from streams.broker import Broker
from streams.delivery import ConsumerStatistics, Delivery, Outcomes
from streams.membership import Membership
from streams.settings import ConsumerLimits
from streams.watchdog import Stuck, diagnose

log = structlog.get_logger(__name__)

__all__ = ["ConsumerStatistics", "Delivery", "PoolConsumer"]

RETRY_S = 0.5  # between attempts while the broker is away
LEASE_RETRY_S = 0.05
ABANDON_S = 1.0  # a cancelled task that has not ended by then is left to itself
MAX_FRUITLESS = 6  # doublings of the watchdog's patience: where records cannot be received, replacing does not help
CALM_S = 0.3  # whoever places records by the workers' statuses has heard by then that a worker drains
NUM_CALM = 3
QUICK_MS = 50.0  # the whole group waits for it at a rebalance


class PoolConsumer:
    """A member of a pool's consumer group. `batches` is the stream of work.

    `async with` joins, until the first assignment, which may be empty where members outnumber partitions, and leaves.
    """

    def __init__(
        self, broker: Broker, topics: Sequence[str], *, group: str, member: str, limits: ConsumerLimits | None = None
    ) -> None:
        self._broker = broker
        self._topics = topics
        self._group = group
        self._name = member
        self._limits = limits or ConsumerLimits()
        self._membership: Membership | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._supervisor: asyncio.Task[None] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._waiting: deque[Delivery] = deque()
        self._wakeup = asyncio.Event()
        self._is_draining = False
        self._num_delivered = self._num_committed = self._num_rebuilds = self._num_fruitless = 0
        self._outcomes = Outcomes()

    async def batches(self) -> AsyncIterator[Sequence[Delivery]]:
        """Yield batches of 1 to `batch_size` deliveries until the consumer drains or closes.

        Every delivery must be acknowledged in the end, else its partition comes to a stand. A crash of the polling
        task is raised here.
        """
        while batch := await self._next_batch():
            self._num_delivered += len(batch)
            yield batch

    async def idle(self, timeout_s: float) -> bool:
        """Go on handing out until for a moment nothing comes and nothing is in work; False if time is up."""
        num_calm = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while num_calm < NUM_CALM:
                    await asyncio.sleep(CALM_S / NUM_CALM)
                    if self._membership is not None:
                        await self._membership.commit()
                        await self._membership.measure_lag()
                    num_calm = num_calm + 1 if self._is_idle() else 0
        return num_calm >= NUM_CALM

    async def drain(self, timeout_s: float) -> bool:
        """Hand out no more, wait for the work in flight and commit it; False if some did not finish in time."""
        self._is_draining = True
        if self._membership is not None:
            self._membership.is_draining = True
            self._membership.balance()
        self._wakeup.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_in_work():
                    await self._woken()
        if self._membership is not None:
            await self._membership.commit()
        return not self._num_in_work()

    async def check_group(self) -> None:
        """Look now whether the group has changed, as after news of a member that has left."""
        if self._membership is not None:
            await self._membership.check_group()

    def statistics(self) -> ConsumerStatistics:
        """Return the state of the consumer."""
        membership = self._membership
        return ConsumerStatistics(
            num_partitions=len(membership.owned) if membership else 0,
            num_paused=len(membership.paused) if membership else 0,
            num_in_flight=membership.num_in_flight if membership else 0,
            num_waiting=len(self._waiting),
            num_delivered=self._num_delivered,
            num_committed=self._num_committed + (membership.num_commits if membership else 0),
            generation=membership.generation if membership else -1,
            lag=membership.lag if membership else None,
            last_poll_at=membership.polled_at if membership else 0.0,
            partitions=frozenset(membership.owned) if membership else frozenset(),
            request_ms=self._outcomes.request_ms,
            error_rate=self._outcomes.error_rate,
            num_behind=len(self._waiting) + (membership.num_unread if membership else 0),
            num_rebuilds=self._num_rebuilds,
        )

    async def __aenter__(self) -> Self:
        self._membership = await self._rejoined()  # a broker that is away at the start is waited for as well
        self._supervisor = asyncio.create_task(self._supervise(self._membership))
        self._supervisor.add_done_callback(lambda _: self._wakeup.set())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Commit what is finished, leave the group and cancel the rest. Idempotent; bounded by the broker's limits."""
        self._is_draining = True
        self._wakeup.set()
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        await self._leave()
        if self._leaving is not None:
            await asyncio.wait((self._leaving,))

    # One stay after another.

    async def _supervise(self, membership: Membership) -> None:
        """Keep a working membership: one that is stuck is left, and another one joins, unless we drain."""
        while not self._is_draining:
            stuck = await self._until_stuck(membership)
            log.error("consumer_stuck", group=self._group, symptom=stuck, num_in_flight=membership.num_in_flight)
            self._num_fruitless = 0 if membership.has_received else min(self._num_fruitless + 1, MAX_FRUITLESS)
            self._num_rebuilds += 1
            membership.lose()  # a stuck client commits nothing; whoever is given the partitions goes on
            await self._leave()
            if not self._is_draining:
                await asyncio.sleep(RETRY_S * (2**self._num_fruitless - 1) / 2)  # each join halts the whole group
                membership = self._membership = await self._rejoined()

    async def _until_stuck(self, membership: Membership) -> Stuck:
        """Poll, commit and watch. Raises what crashed."""
        polling = self._task(self._poll_forever(membership))
        committing = self._task(self._commit_forever(membership))
        watching: asyncio.Task[Stuck] = self._task(self._watch(membership))
        tasks = (polling, committing, watching)
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=ABANDON_S)
        for task in tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error
        return watching.result() if watching.done() and not watching.cancelled() else Stuck.DEAD

    async def _join(self) -> Membership:
        membership = Membership(
            self._topics,
            self._group,
            self._limits,
            settle=self._settle,
            on_change=self._on_change,
            on_done=self._on_done,
        )
        await membership.join(self._broker, self._name)
        membership.is_draining = self._is_draining
        return membership

    async def _rejoined(self) -> Membership:
        while True:
            try:
                return await self._join()
            except UnavailableError as error:
                log.warning("join_failed", group=self._group, error=error.message)
            await asyncio.sleep(RETRY_S)

    async def _leave(self) -> None:
        """Leave the group. Once begun it goes on, whoever is cancelled meanwhile."""
        membership, self._membership = self._membership, None
        self._waiting.clear()
        self._wakeup.set()  # nothing is in work any more
        if membership is not None:
            self._leaving = self._task(membership.close())
            await asyncio.shield(self._leaving)
            self._num_committed += membership.num_commits

    def _task(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Receive, hand out, commit, watch.

    async def _poll_forever(self, membership: Membership) -> None:
        """Poll as long as the member lives."""
        while membership.is_alive():
            try:
                deliveries = await membership.poll()
            except UnavailableError as error:
                log.warning("poll_failed", group=self._group, error=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            if deliveries and membership is self._membership:
                self._waiting.extend(deliveries)
                self._wakeup.set()

    async def _commit_forever(self, membership: Membership) -> None:
        while True:
            await asyncio.sleep(self._limits.commit_interval_ms / 1000)
            await membership.commit()
            await membership.measure_lag()
            self._wakeup.set()

    async def _watch(self, membership: Membership) -> Stuck:
        stuck_s, loop = self._limits.stuck_ms / 1000, asyncio.get_running_loop()
        while True:
            began = loop.time()
            await asyncio.sleep(stuck_s / 4)
            has_stood_still = loop.time() - began > stuck_s / 2  # the whole process: the member had no turn either
            patience_s = stuck_s * 2**self._num_fruitless
            stuck = None if self._is_draining or has_stood_still else diagnose(membership.vitals(), patience_s)
            if stuck is not None:
                return stuck

    async def _next_batch(self) -> Sequence[Delivery]:
        while not self._is_draining:
            if self._supervisor is not None and self._supervisor.done() and not self._supervisor.cancelled():
                self._supervisor.result()  # raises what crashed
            wait_s = self._seconds_to_batch()
            if wait_s is not None and wait_s <= 0:
                num_records = min(self._limits.batch_size, len(self._waiting))
                return [self._waiting.popleft() for _ in range(num_records)]
            await self._woken(wait_s)
        return ()

    def _seconds_to_batch(self) -> float | None:
        if not self._waiting or self._membership is None or self._membership.is_rebalancing:
            return None
        if not self._membership.is_leased():
            return LEASE_RETRY_S
        if len(self._waiting) >= min(self._limits.batch_size, self._limits.max_in_flight):
            return 0.0
        waited_s = asyncio.get_running_loop().time() - self._waiting[0].received_at
        return self._limits.max_wait_ms / 1000 - waited_s

    def _is_idle(self) -> bool:
        membership = self._membership
        is_working = membership is None or membership.is_rebalancing or membership.num_in_flight or self._waiting
        return not is_working and membership is not None and membership.lag == 0

    def _num_in_work(self) -> int:
        return self._membership.num_in_flight - len(self._waiting) if self._membership else 0

    def _on_done(self, delivery: Delivery) -> None:
        self._outcomes.add(delivery, asyncio.get_running_loop().time())
        self._wakeup.set()

    async def _settle(self) -> None:
        """Let work that is usually quick finish before its partition is taken away, so that nobody repeats it."""
        if self._outcomes.request_ms > QUICK_MS:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(QUICK_MS / 1000):
                while self._num_in_work():
                    await self._woken()

    def _on_change(self) -> None:
        self._waiting = deque(delivery for delivery in self._waiting if delivery.is_current())
        self._wakeup.set()

    async def _woken(self, timeout_s: float | None = None) -> None:
        self._wakeup.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wakeup.wait()
