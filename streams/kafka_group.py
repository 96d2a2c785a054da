"""A member of a Kafka consumer group.

aiokafka rebalances in a task of its own, beside the one that polls. What is done about it here: records of a new
assignment are held back until its callback is over, records of an assignment that has ended are dropped (its positions
are read again), and a commit counts only in the generation that the member was given its partitions in.

Exactly one assignor: aiokafka sends one join per assignor, and its sticky one shares state over all consumers of a
process (aiokafka#1175, #1176). `getmany` is bounded by its own timeout only: cancelling it would switch the enforcement
of `max_poll_interval_ms` off.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

import structlog
from aiokafka import AIOKafkaConsumer
from aiokafka.abc import ConsumerRebalanceListener
from aiokafka.errors import (
    CommitFailedError,
    IllegalGenerationError,
    IllegalStateError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)
from aiokafka.structs import OffsetAndMetadata

from schemas.errors import BrokerUnavailableError
from streams.broker import AssignedCallback, Assignment, Record, RevokedCallback, TopicPartition
from streams.kafka_assignor import assignor_of
from streams.kafka_client import client_options, kafka_place, our_place, stop_consumer, translated
from streams.kafka_control import KafkaControl
from streams.kafka_fetch import Fetch
from streams.kafka_lease import Lease
from streams.settings import BrokerSettings, Timeouts

log = structlog.get_logger(__name__)

UNHEARD_CLOSE_MS = 1_000
FETCH_WAIT_MS = 100  # how long a partition that was just resumed may wait behind a running fetch
UNKNOWN_END = 2**63 - 1  # where the end cannot be asked, every record may be a take-over
MOVED_ON = (
    CommitFailedError,
    IllegalGenerationError,
    IllegalStateError,
    RebalanceInProgressError,
    UnknownMemberIdError,
)


class KafkaGroupConsumer(ConsumerRebalanceListener):  # type: ignore[misc]  # aiokafka has no types
    """A member of a group; `start` must have been called."""

    def __init__(
        self,
        settings: BrokerSettings,
        timeouts: Timeouts,
        control: KafkaControl,
        topics: Sequence[str],
        group: str,
        member: str,
        on_revoked: RevokedCallback,
        on_assigned: AssignedCallback,
    ) -> None:
        self._timeouts = timeouts
        self._control = control
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._generation = -1
        self._owned: frozenset[TopicPartition] = frozenset()
        self._settled = asyncio.Event()  # set from the end of the assigned callback to the revoked one
        self._failure: BaseException | None = None
        self._is_closed = False
        self._client: Any = AIOKafkaConsumer(
            **client_options(settings, timeouts, f"{settings.client_id}-{member}"),
            group_id=group,
            enable_auto_commit=False,
            auto_offset_reset="earliest",
            partition_assignment_strategy=(assignor_of(member),),
            session_timeout_ms=timeouts.session_ms,
            heartbeat_interval_ms=timeouts.heartbeat_ms,
            rebalance_timeout_ms=timeouts.rebalance_ms,
            max_poll_interval_ms=timeouts.max_poll_interval_ms,
            fetch_max_wait_ms=FETCH_WAIT_MS,
            max_partition_fetch_bytes=2 * 1024 * 1024,
        )
        self._fetch = Fetch(self._client)
        self._lease = Lease(timeouts.session_ms / 1000)
        self._client.subscribe(list(topics), listener=self)

    async def start(self) -> None:
        """Join and wait for the first assignment. Raises BrokerUnavailableError."""
        try:
            with translated("join the group"):
                async with asyncio.timeout((self._timeouts.request_ms + self._timeouts.rebalance_ms) / 1000):
                    await self._client.start()
                    await self._settled.wait()
        except BaseException:
            await self.close()
            raise

    async def poll(self, *, timeout_ms: int, max_records: int) -> Sequence[Record]:
        """Return the next records of the partitions that are not paused."""
        self._raise_failure()
        if not self.is_alive():
            await asyncio.sleep(timeout_ms / 1000)
            return ()
        if not await self._is_settled_within(timeout_ms):
            return ()
        with translated("poll"):
            try:
                fetched = await self._fetch(timeout_ms, max_records)
            finally:
                # One task polls: whatever getmany leaves behind when it fails is wrong, and would switch the
                # enforcement of max_poll_interval_ms off.
                self._client._subscription._fetch_count = 0
        if fetched and not self._settled.is_set():
            source = self._current()
            await self._settled.wait()
            if self._current() is not source:
                return ()
        self._raise_failure()
        return fetched  # no await since getmany has taken them: they belong to this assignment

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> bool:
        """Commit offsets, in the generation of the assignment only; False if the group has moved on.

        Goes below aiokafka's `commit`, which would try again under the next generation.
        """
        coordinator = self._client._coordinator
        if not self._is_member() or not offsets.keys() <= self._owned:
            return False
        wanted = {kafka_place(place): OffsetAndMetadata(offset, "") for place, offset in offsets.items()}
        try:
            with translated("commit"):
                async with asyncio.timeout(self._timeouts.request_ms / 1000):
                    await coordinator._do_commit_offsets(self._current(), wanted)
        except BrokerUnavailableError as error:
            if isinstance(error.__cause__, MOVED_ON):
                return False
            raise
        return True

    async def committed(self, place: TopicPartition) -> int | None:
        """Return the committed offset, None if there is none."""
        with translated("ask for the committed offset"):
            async with asyncio.timeout(self._timeouts.request_ms / 1000):
                found: int | None = await self._client.committed(kafka_place(place))
        return found

    async def end_offsets(self, places: frozenset[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the offset after the last record of each partition."""
        return await self._control.end_offsets(places) if places else {}

    async def begin_offsets(self, places: frozenset[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the offset of the first retained record of each partition."""
        return await self._control.begin_offsets(places) if places else {}

    def assignment(self) -> frozenset[TopicPartition]:
        """Return what this member owns now."""
        return self._owned

    def is_leased(self) -> bool:
        """Return whether the group surely counts this member as the owner of its partitions."""
        return self._is_member() and self._lease.is_valid()

    async def check_group(self) -> None:
        """Send a heartbeat now: its answer tells of a rebalance."""
        coordinator = self._client._coordinator
        if not self._is_member() or not self._settled.is_set() or coordinator._rejoin_needed_fut.done():
            return
        with translated("look at the group"):
            async with asyncio.timeout(self._timeouts.request_ms / 1000):
                await coordinator._do_heartbeat()

    def is_alive(self) -> bool:
        """Return whether aiokafka's task that keeps the membership still runs."""
        coordinator = self._client._coordinator
        return coordinator is not None and not coordinator._coordination_task.done()

    def pause(self, places: frozenset[TopicPartition]) -> None:
        """Stop handing out records of these partitions."""
        self._client.pause(*(kafka_place(place) for place in places & self._assigned()))

    def resume(self, places: frozenset[TopicPartition]) -> None:
        """Hand out records of these partitions again."""
        self._client.resume(*(kafka_place(place) for place in places & self._assigned()))

    async def close(self) -> None:
        """Leave the group and close, in bounded time. Idempotent."""
        if not self._is_closed:
            is_heard = self._lease.is_valid()  # a broker that has not answered for long will not take our leave
            self._is_closed = True
            await stop_consumer(self._client, self._timeouts.close_ms if is_heard else UNHEARD_CLOSE_MS)
            self._owned = frozenset()

    # aiokafka calls these from its own task; an exception here would only be logged.

    async def on_partitions_revoked(self, revoked: Any) -> None:
        """Tell the owner, who may still commit."""
        self._settled.clear()
        self._lease.watch(self._client._coordinator)  # called before the first join, too
        if self._generation >= 0:
            await self._watched(self._on_revoked(self._owned))
        self._owned = frozenset()

    async def on_partitions_assigned(self, assigned: Any) -> None:
        """Tell the owner, then let records through."""
        generation = self._client._coordinator.generation
        if generation < 0:
            return  # thrown out in the meantime: the next assignment follows at once
        places = frozenset(our_place(place) for place in assigned)
        ends = await self._ends(places)
        self._generation, self._owned = generation, places
        assignment = Assignment(generation=generation, partitions=places, end_offsets=ends)
        await self._watched(self._on_assigned(assignment))
        self._settled.set()

    async def _ends(self, places: frozenset[TopicPartition]) -> Mapping[TopicPartition, int]:
        try:
            found = await self.end_offsets(places)
        except BrokerUnavailableError as error:
            log.warning("end_offsets_unknown", error=error.message)
            found = {}
        return {place: found.get(place, UNKNOWN_END) for place in places}

    async def _watched(self, callback: Awaitable[None]) -> None:
        try:
            await callback
        except Exception as error:  # it must not stop the rebalance: `poll` raises it
            self._failure = error

    def _is_member(self) -> bool:
        """Return whether the generation of our partitions is, as far as we know, the present one."""
        coordinator = self._client._coordinator
        return coordinator is not None and coordinator.generation == self._generation and not self._is_closed

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _is_settled_within(self, timeout_ms: int) -> bool:
        if not self._settled.is_set():
            try:
                async with asyncio.timeout(timeout_ms / 1000):
                    await self._settled.wait()
            except TimeoutError:
                # A poll like any other: else a rebalance that outlasts `max_poll_interval_ms`, as over an outage, would
                # never end, since aiokafka lets no idle member join again (aiokafka#1187).
                self._client._subscription._last_fetch_ended = time.monotonic()
                return False
        return True

    def _current(self) -> Any:
        """Return aiokafka's object for the present assignment: another one after each rebalance."""
        return self._client._subscription.subscription.assignment

    def _assigned(self) -> frozenset[TopicPartition]:
        return frozenset(our_place(place) for place in self._client.assignment())
