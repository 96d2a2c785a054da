"""One stay in a consumer group, from join to leave: partitions with their offsets, commits, backpressure, rebalance.

It knows records and offsets, not who handles them. The invariants: an offset is committed only when it and every
received offset before it are done; a record is received at most once while its partition stays ours; partitions are
paused where a limit is reached, and polled all the same.

A rebalance takes every partition away and gives some back (eager). A partition counts as kept only over consecutive
generations: its work then goes on, and what comes again is recognised. Otherwise its tasks are cancelled, and what they
acknowledge later commits nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import structlog

from schemas.errors import UnavailableError
from streams.broker import Assignment, Broker, GroupConsumer, Record, TopicPartition
from streams.delivery import Delivery, Ownership
from streams.settings import ConsumerLimits
from streams.watchdog import Vitals

log = structlog.get_logger(__name__)

ROOM_SHARE = 4  # so much of the limit is much room
ROOM_WAIT_S = 0.05  # work that lasts longer is worth a pause
MUCH_ROOM_WAIT_S = 0.005  # what comes to a worker that is nearly full waits that long at most
REVOKE_COMMIT_S = 3.0  # every other member waits for us meanwhile


class Membership:
    """A member of a group.

    `settle` is awaited before partitions are taken away, `on_change` is called when others are given, `on_done` for
    every acknowledgement that counts.
    """

    def __init__(
        self,
        topics: Sequence[str],
        group: str,
        limits: ConsumerLimits,
        *,
        settle: Callable[[], Awaitable[None]],
        on_change: Callable[[], None],
        on_done: Callable[[Delivery], None],
    ) -> None:
        self.owned: dict[TopicPartition, Ownership] = {}
        self.paused: frozenset[TopicPartition] = frozenset()
        self.generation = -1
        self.lag: int | None = None
        self.num_unread = 0
        self.num_in_flight = 0
        """Records that are received and not acknowledged."""
        self.num_commits = 0
        self.polled_at = asyncio.get_running_loop().time()
        self.is_draining = False
        self.has_received = False
        self._topics = topics
        self._group = group
        self._limits = limits
        self._settle = settle
        self._on_change = on_change
        self._on_done = on_done
        self._member: GroupConsumer | None = None
        self._is_full = False
        self._has_room = asyncio.Event()
        self._is_over = False
        self._committing = asyncio.Lock()
        self._rebalancing_since: float | None = None
        self._heard_since: float | None = None
        self._idle_since: float | None = None

    async def join(self, broker: Broker, member: str) -> None:
        """Join, and return with the first assignment. Raises BrokerUnavailableError."""
        self._member = await broker.group_consumer(
            self._topics, group=self._group, member=member, on_revoked=self._on_revoked, on_assigned=self._on_assigned
        )
        self.polled_at = _now()

    async def poll(self) -> list[Delivery]:
        """Return deliveries of new records; may be empty. Raises UnavailableError."""
        assert self._member is not None
        if not self._has_much_room():
            await self._room()
        self.balance()
        room = max(1, min(self._limits.max_in_flight - self.num_in_flight, self._limits.window))
        try:
            records = await self._member.poll(timeout_ms=self._limits.poll_timeout_ms, max_records=room)
        finally:
            self.polled_at = _now()
        return self._received(records)  # no await since the records were taken: they belong to this assignment

    def _note_done(self, delivery: Delivery) -> None:
        """Take note of an acknowledgement: it may lift a pause, or make room."""
        self.num_in_flight -= 1
        if not self._has_room.is_set() and self._has_much_room():
            self._has_room.set()
        if self.paused and self._may_resume(delivery):
            self.balance()
        self._on_done(delivery)

    def _has_much_room(self) -> bool:
        limit = self._limits.max_in_flight
        return self.num_in_flight < limit and limit - self.num_in_flight >= limit // ROOM_SHARE

    def _may_resume(self, delivery: Delivery) -> bool:
        if self._is_full:
            return self.num_in_flight <= self._limits.max_in_flight // 2
        ownership = self.owned.get(delivery.record.place)
        return ownership is not None and ownership.tracker.span <= self._limits.window // 2

    def is_leased(self) -> bool:
        """Return whether the group surely still counts us as the owner of what we have."""
        is_member = self._member is not None and not self._is_over and self._rebalancing_since is None
        return is_member and self._member is not None and self._member.is_leased()

    def is_alive(self) -> bool:
        """Return whether the member can still take part in the group."""
        return self._member is not None and self._member.is_alive()

    async def check_group(self) -> None:
        """Look now whether the group has changed; a broker that is away is asked again by the next heartbeat."""
        if self._member is not None:
            with suppress(UnavailableError):
                await self._member.check_group()

    @property
    def is_rebalancing(self) -> bool:
        """Return whether our partitions were taken away and new ones are not given yet."""
        return self._rebalancing_since is not None

    def vitals(self) -> Vitals:
        """Return what the watchdog needs to know."""
        return Vitals(
            now=_now(),
            heard_since=self._heard_since,
            polled_at=self.polled_at,
            rebalancing_since=self._rebalancing_since,
            idle_since=self._idle_since,
            is_dead=not self.is_alive(),
        )

    async def close(self) -> None:
        """Commit what is finished and leave the group, in bounded time. Idempotent."""
        await self.commit()
        self.lose()
        member, self._member = self._member, None
        if member is not None:
            await member.close()

    def lose(self) -> None:
        """Give everything up: what runs is cancelled, and nothing is committed any more."""
        self._is_over = True
        for ownership in self.owned.values():
            ownership.lose()
        self.owned = {}
        self.num_in_flight = 0

    async def _room(self) -> None:
        """Wait a moment for much room.

        Quick work makes it at once; it would be taken, and written, in ever smaller portions otherwise. And where there
        is no room at all, a pause throws away what was fetched ahead.
        """
        wait_s = ROOM_WAIT_S if self.num_in_flight >= self._limits.max_in_flight else MUCH_ROOM_WAIT_S
        self._has_room.clear()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._has_room.wait(), min(wait_s, self._limits.poll_timeout_ms / 1000))

    def _received(self, records: Sequence[Record]) -> list[Delivery]:
        deliveries = []
        for record in records:
            ownership = self.owned.get(record.place)
            if ownership is None:
                continue
            if ownership.tracker.start(record.offset):  # else it was read again after a rebalance
                deliveries.append(Delivery(record, ownership, self.polled_at, self._note_done))
        self.num_in_flight += len(deliveries)
        if records:
            self.has_received = True
            self._idle_since = None
        return deliveries

    # Commit.

    async def commit(self) -> None:
        """Commit what is new; a refusal or a failure is normal, the next owner or the next attempt cures it."""
        if self._member is None or self._is_over:
            return
        async with self._committing:
            owned = dict(self.owned)
            offsets = {place: offset for place, o in owned.items() if (offset := o.uncommitted()) is not None}
            if not offsets:
                return
            try:
                is_committed = await self._member.commit(offsets)
            except UnavailableError as error:
                log.warning("commit_failed", group=self._group, error=error.message)
                return
            if is_committed:
                self.num_commits += 1
                for place, offset in offsets.items():
                    owned[place].committed = offset

    async def measure_lag(self) -> None:
        """Ask the broker how much there is; its answer also tells that it can be heard."""
        if self._member is None:
            return
        asked = frozenset(self.owned) or frozenset({TopicPartition(self._topics[0], 0)})
        try:
            ends = await self._member.end_offsets(asked)
            new = {place: ownership for place, ownership in self.owned.items() if ownership.base is None}
            begins = await self._member.begin_offsets(frozenset(new))
            for place, ownership in new.items():  # what retention has removed waits for nobody
                ownership.base = max(await self._member.committed(place) or 0, begins[place])
        except UnavailableError:
            self.lag = self._heard_since = self._idle_since = None
            return
        known = [(ownership, ends[place]) for place, ownership in self.owned.items() if place in ends]
        self.lag = sum(ownership.lag(end) for ownership, end in known)
        self.num_unread = sum(ownership.num_unread(end) for ownership, end in known)
        self._note_heard()

    def _note_heard(self) -> None:
        now = _now()
        if self._heard_since is None:
            self._heard_since = now
        is_kept_from_work = self.num_in_flight or self.paused or self.is_rebalancing
        if not self.lag or is_kept_from_work:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now

    # Backpressure: pause, and keep polling.

    def balance(self) -> None:
        """Pause and resume partitions as the limits say; lifted at half the limit, so that it does not flutter."""
        if self._member is None:
            return
        in_flight = self.num_in_flight
        is_above = in_flight >= self._limits.max_in_flight
        self._is_full = is_above or (self._is_full and in_flight > self._limits.max_in_flight // 2)
        wanted = frozenset(p for p, o in self.owned.items() if self._is_full or self._is_too_wide(p, o))
        if self.is_draining:
            wanted = frozenset(self.owned)
        if stopped := wanted - self.paused:
            self._member.pause(stopped)
        if resumed := self.paused - wanted:
            self._member.resume(resumed)
        self.paused = wanted

    def _is_too_wide(self, place: TopicPartition, ownership: Ownership) -> bool:
        span = ownership.tracker.span
        return span >= self._limits.window or (place in self.paused and span > self._limits.window // 2)

    # Rebalance. These run beside the polling task and never wait for it.

    async def _on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        if self._is_over:
            return
        self._rebalancing_since = _now()
        with suppress(TimeoutError):
            async with asyncio.timeout(REVOKE_COMMIT_S):
                await self._settle()
                await self.commit()

    async def _on_assigned(self, assignment: Assignment) -> None:
        if self._is_over:
            return
        is_consecutive = assignment.generation == self.generation + 1
        kept = self.owned if is_consecutive else {}
        owned = {
            place: kept.get(place) or Ownership(assignment.generation, assignment.end_offsets[place], self.is_leased)
            for place in assignment.partitions
        }
        for place, ownership in self.owned.items():
            if owned.get(place) is not ownership:
                ownership.lose()
        for ownership in owned.values():
            ownership.generation = assignment.generation
        log.info("assigned", group=self._group, generation=assignment.generation, num_partitions=len(owned))
        self.owned = owned
        self.num_in_flight = sum(ownership.tracker.num_running for ownership in owned.values())
        self.generation = assignment.generation
        self.paused = frozenset()  # the broker has forgotten them
        self._rebalancing_since = self._idle_since = None
        self.balance()
        self._on_change()


def _now() -> float:
    return asyncio.get_running_loop().time()
