"""A pool's consumer: batches of records out, contiguous offsets back, whatever the order in which work completes.

It knows records and offsets, not what they mean. Three invariants hold: an offset is committed only when it and every
received offset before it are done; at most `max_in_flight` records are received and unfinished, and less than twice
`window` offsets per partition, by pausing and never by ceasing to poll; a record is handed out at most once while its
partition stays ours.

A rebalance takes every partition away and gives some back (eager). A partition counts as kept only over consecutive
generations: its work then goes on, and what comes again is recognised. Otherwise its tasks are cancelled, and what they
acknowledge later commits nothing.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self

import structlog

from schemas.errors import UnavailableError
from streams.broker import Assignment, Broker, GroupConsumer, Record, TopicPartition
from streams.delivery import ConsumerStatistics, Delivery, Ownership
from streams.settings import ConsumerLimits

log = structlog.get_logger(__name__)

__all__ = ["ConsumerStatistics", "Delivery", "PoolConsumer"]

RETRY_S = 0.5  # between attempts while the broker is away


class PoolConsumer:
    """A member of a pool's consumer group. `async with` joins and leaves; `batches` is the stream of work."""

    def __init__(
        self, broker: Broker, topics: Sequence[str], *, group: str, member: str, limits: ConsumerLimits | None = None
    ) -> None:
        self._broker = broker
        self._topics = topics
        self._group = group
        self._name = member
        self._limits = limits or ConsumerLimits()
        self._member: GroupConsumer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._owned: dict[TopicPartition, Ownership] = {}
        self._paused: frozenset[TopicPartition] = frozenset()
        self._is_full = False
        self._waiting: deque[Delivery] = deque()
        self._wakeup = asyncio.Event()
        self._is_joined = asyncio.Event()
        self._committing = asyncio.Lock()
        self._generation = -1
        self._is_rebalancing = False
        self._is_draining = False
        self._num_delivered = 0
        self._num_committed = 0
        self._lag: int | None = None
        self._last_poll_at = 0.0

    # The stream of work.

    async def batches(self) -> AsyncIterator[Sequence[Delivery]]:
        """Yield batches of 1 to `batch_size` deliveries until the consumer drains or closes.

        Every delivery must be acknowledged in the end, else its partition comes to a stand. A crash of the polling
        task is raised here.
        """
        while batch := await self._next_batch():
            self._num_delivered += len(batch)
            yield batch

    async def joined(self) -> None:
        """Wait for the first assignment; it may be empty where there are more members than partitions."""
        await self._is_joined.wait()

    async def drain(self, timeout_s: float) -> bool:
        """Hand out no more, wait for the work in flight and commit it; False if some did not finish in time."""
        self._is_draining = True
        self._balance()
        self._wakeup.set()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._num_in_flight() > len(self._waiting):
                    await self._woken()
        await self._commit()
        return self._num_in_flight() == len(self._waiting)

    def statistics(self) -> ConsumerStatistics:
        """Return the state of the consumer."""
        return ConsumerStatistics(
            num_partitions=len(self._owned),
            num_paused=len(self._paused),
            num_in_flight=self._num_in_flight(),
            num_waiting=len(self._waiting),
            num_delivered=self._num_delivered,
            num_committed=self._num_committed,
            generation=self._generation,
            lag=self._lag,
            last_poll_at=self._last_poll_at,
        )

    async def __aenter__(self) -> Self:
        self._member = await self._broker.group_consumer(
            self._topics,
            group=self._group,
            member=self._name,
            on_revoked=self._on_revoked,
            on_assigned=self._on_assigned,
        )
        for work in (self._poll_forever(), self._commit_forever()):
            task = asyncio.create_task(work)
            task.add_done_callback(lambda _: self._wakeup.set())
            self._tasks.append(task)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Commit what is finished, leave the group and cancel the rest. Idempotent; bounded by the broker's limits."""
        self._is_draining = True
        self._wakeup.set()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._member is not None:
            await self._commit()
            member, self._member = self._member, None
            await member.close()
        for ownership in self._owned.values():
            ownership.lose()
        self._owned.clear()
        self._waiting.clear()

    # Receive, hand out, commit.

    async def _poll_forever(self) -> None:
        assert self._member is not None
        while True:
            self._balance()
            room = max(1, min(self._limits.max_in_flight - self._num_in_flight(), self._limits.window))
            try:
                records = await self._member.poll(timeout_ms=self._limits.poll_timeout_ms, max_records=room)
            except UnavailableError as error:
                log.warning("poll_failed", group=self._group, error=error.message)
                await asyncio.sleep(RETRY_S)
                continue
            self._receive(records)  # no await since the records were taken: they belong to this assignment

    def _receive(self, records: Sequence[Record]) -> None:
        self._last_poll_at = asyncio.get_running_loop().time()
        for record in records:
            ownership = self._owned.get(record.place)
            if ownership is None:
                continue
            tracker = ownership.tracker
            if tracker.is_running(record.offset) or tracker.is_finished(record.offset):
                continue  # read again after a rebalance
            tracker.start(record.offset)
            self._waiting.append(Delivery(record, ownership, self._last_poll_at, self._on_done))
        if records:
            self._wakeup.set()

    async def _next_batch(self) -> Sequence[Delivery]:
        while not self._is_draining:
            self._raise_crash()
            wait_s = self._seconds_to_batch()
            if wait_s is not None and wait_s <= 0:
                num_records = min(self._limits.batch_size, len(self._waiting))
                return [self._waiting.popleft() for _ in range(num_records)]
            await self._woken(wait_s)
        return ()

    def _seconds_to_batch(self) -> float | None:
        if not self._waiting or self._is_rebalancing:
            return None
        if len(self._waiting) >= min(self._limits.batch_size, self._limits.max_in_flight):
            return 0.0
        waited_s = asyncio.get_running_loop().time() - self._waiting[0].received_at
        return self._limits.max_wait_ms / 1000 - waited_s

    async def _commit_forever(self) -> None:
        while True:
            await asyncio.sleep(self._limits.commit_interval_ms / 1000)
            await self._commit()
            await self._measure_lag()

    async def _commit(self) -> None:
        """Commit what is new; a refusal or a failure is normal, the next owner or the next attempt cures it."""
        if self._member is None:
            return
        async with self._committing:
            owned = dict(self._owned)
            offsets = {place: offset for place, o in owned.items() if (offset := _uncommitted(o)) is not None}
            if not offsets:
                return
            try:
                is_committed = await self._member.commit(offsets)
            except UnavailableError as error:
                log.warning("commit_failed", group=self._group, error=error.message)
                return
            if is_committed:
                self._num_committed += 1
                for place, offset in offsets.items():
                    owned[place].committed = offset

    async def _measure_lag(self) -> None:
        if self._member is None:
            return
        try:
            ends = await self._member.end_offsets(frozenset(self._owned))
            new = {place: ownership for place, ownership in self._owned.items() if ownership.base is None}
            begins = await self._member.begin_offsets(frozenset(new))
            for place, ownership in new.items():  # what retention has removed waits for nobody
                ownership.base = max(await self._member.committed(place) or 0, begins[place])
        except UnavailableError:
            self._lag = None
            return
        self._lag = _lag(self._owned, ends)

    # Backpressure: pause, and keep polling.

    def _balance(self) -> None:
        """Pause and resume partitions as the limits say; lifted at half the limit, so that it does not flutter."""
        if self._member is None:
            return
        in_flight = self._num_in_flight()
        is_above = in_flight >= self._limits.max_in_flight
        self._is_full = is_above or (self._is_full and in_flight > self._limits.max_in_flight // 2)
        wanted = frozenset(p for p, o in self._owned.items() if self._is_full or self._is_over(p, o))
        if self._is_draining:
            wanted = frozenset(self._owned)
        if stopped := wanted - self._paused:
            self._member.pause(stopped)
        if resumed := self._paused - wanted:
            self._member.resume(resumed)
        self._paused = wanted

    def _is_over(self, place: TopicPartition, ownership: Ownership) -> bool:
        span = ownership.tracker.span
        return span >= self._limits.window or (place in self._paused and span > self._limits.window // 2)

    def _num_in_flight(self) -> int:
        return sum(ownership.tracker.num_running for ownership in self._owned.values())

    def _on_done(self) -> None:
        self._balance()
        self._wakeup.set()

    # Rebalance. These run beside the polling task and never wait for it.

    async def _on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self._is_rebalancing = True
        await self._commit()

    async def _on_assigned(self, assignment: Assignment) -> None:
        is_consecutive = assignment.generation == self._generation + 1
        kept = self._owned if is_consecutive else {}
        owned = {
            place: kept.get(place) or Ownership(assignment.generation, assignment.end_offsets[place])
            for place in assignment.partitions
        }
        for place, ownership in self._owned.items():
            if owned.get(place) is not ownership:
                ownership.lose()
        for ownership in owned.values():
            ownership.generation = assignment.generation
        log.info("assigned", group=self._group, generation=assignment.generation, num_partitions=len(owned))
        self._owned = owned
        self._generation = assignment.generation
        self._waiting = deque(delivery for delivery in self._waiting if delivery.is_current())
        self._paused = frozenset()  # the broker has forgotten them
        self._is_rebalancing = False
        self._is_joined.set()
        self._balance()
        self._wakeup.set()

    # Waiting.

    async def _woken(self, timeout_s: float | None = None) -> None:
        self._wakeup.clear()
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wakeup.wait()

    def _raise_crash(self) -> None:
        for task in self._tasks:
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                raise error


def _uncommitted(ownership: Ownership) -> int | None:
    offset = ownership.tracker.committable()
    return None if offset == ownership.committed else offset


def _lag(owned: Mapping[TopicPartition, Ownership], ends: Mapping[TopicPartition, int]) -> int:
    return sum(
        max(0, ends[place] - max(o.committed or 0, o.base or 0))
        for place, o in owned.items()
        if place in ends and o.base is not None
    )
