"""What the in-memory broker makes: producers, group members and readers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING

from schemas.envelope import Headers
from streams.broker import AssignedCallback, Assignment, Record, RevokedCallback, TopicPartition
from streams.memory_group import MemoryGroup

if TYPE_CHECKING:
    from streams.memory import MemoryBroker


class MemoryProducer:
    """Writes records."""

    def __init__(self, broker: MemoryBroker) -> None:
        self._broker = broker

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> Record:
        """Append one record and return it with its place."""
        await asyncio.sleep(0)  # as with a server, other tasks run before the acknowledgement
        return self._broker.append(topic, value, key, headers, partition)

    async def close(self) -> None:
        """Close; there is nothing to flush."""


class _Positions:
    """The next offset of each partition, and polling from there."""

    def __init__(self, broker: MemoryBroker, *, is_reset_to_earliest: bool) -> None:
        self.broker = broker
        self.is_reset_to_earliest = is_reset_to_earliest
        self.positions: dict[TopicPartition, int] = {}
        self.paused: set[TopicPartition] = set()
        self.failure: BaseException | None = None

    async def poll(self, timeout_ms: int, max_records: int) -> Sequence[Record]:
        deadline = asyncio.get_running_loop().time() + timeout_ms / 1000
        while True:
            self.broker.check_up()
            if self.failure is not None:
                raise self.failure
            if records := self._take(max_records):
                return records
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0 or not await self.broker.wait(left):
                return ()

    def _take(self, max_records: int) -> list[Record]:
        taken: list[Record] = []
        for place in [place for place in self.positions if place not in self.paused]:
            log = self.broker.log(place)
            if self.is_reset_to_earliest:
                self.positions[place] = max(self.positions[place], log.begin)
            found = log.read(self.positions[place], max_records - len(taken))
            if found:
                self.positions[place] = found[-1].offset + 1
                self.positions[place] = self.positions.pop(place)  # last in turn, so that none starves
                taken.extend(found)
            if len(taken) >= max_records:
                break
        return taken


class MemoryGroupConsumer:
    """A member of a group."""

    def __init__(
        self,
        broker: MemoryBroker,
        group: MemoryGroup,
        name: str,
        topics: Sequence[str],
        on_revoked: RevokedCallback,
        on_assigned: AssignedCallback,
    ) -> None:
        self.name = name
        self.topics = frozenset(topics)
        self.is_stuck = False
        """Whether its polls do not return, although it stays in the group."""
        self.is_unheard = False
        """Whether it does not know if the group still counts on it."""
        self.is_dead = False
        """Whether it can take no part in the group any more, although it has not left."""
        self._group = group
        self._broker = broker
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._log = _Positions(broker, is_reset_to_earliest=True)
        self._owned: frozenset[TopicPartition] = frozenset()
        self._generation = -1

    async def poll(self, *, timeout_ms: int, max_records: int) -> Sequence[Record]:
        """Return the next records of the partitions that are not paused."""
        if self.is_stuck:
            await asyncio.Event().wait()
        return await self._log.poll(timeout_ms, max_records)

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> bool:
        """Commit offsets; False if the group has moved on."""
        self._broker.check_up()
        is_committed = self._group.commit(self, self._generation, offsets)
        self._broker.notify()
        return is_committed

    async def committed(self, place: TopicPartition) -> int | None:
        """Return the committed offset, None if there is none."""
        self._broker.check_up()
        return self._group.committed.get(place)

    async def end_offsets(self, places: frozenset[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the offset after the last record of each partition."""
        self._broker.check_up()
        return {place: self._broker.log(place).end for place in places}

    async def begin_offsets(self, places: frozenset[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the offset of the first retained record of each partition."""
        self._broker.check_up()
        return {place: self._broker.log(place).begin for place in places}

    def assignment(self) -> frozenset[TopicPartition]:
        """Return what this member owns now."""
        return self._owned

    def is_leased(self) -> bool:
        """Return whether the group counts this member as the owner of its partitions, as far as it can know."""
        is_member = self in self._group.members and self._generation == self._group.generation
        return is_member and not self.is_unheard

    async def check_group(self) -> None:
        """Do nothing: here every member hears of a change at once."""
        self._broker.check_up()

    def is_alive(self) -> bool:
        """Return whether this member can still take part in the group."""
        return not self.is_dead

    def pause(self, places: frozenset[TopicPartition]) -> None:
        """Stop handing out records of these partitions."""
        self._log.paused |= places & self._owned

    def resume(self, places: frozenset[TopicPartition]) -> None:
        """Hand out records of these partitions again."""
        self._log.paused -= places
        self._broker.notify()

    async def close(self) -> None:
        """Leave the group."""
        self._log.positions.clear()
        self._owned = frozenset()
        await self._group.remove(self, self._broker.places)
        self._broker.notify()

    def crash(self) -> None:
        """Never hand out a record again, as a process that is gone."""
        self._log.positions.clear()

    async def revoke(self) -> None:
        """Take every partition back; the callback may still commit."""
        self._log.positions.clear()
        if self._generation >= 0:
            await self._watched(self._on_revoked(self._owned))
        self._owned = frozenset()

    async def assign(self, assignment: Assignment) -> None:
        """Take partitions; records come after the callback."""
        self._log.paused.clear()
        self._generation = assignment.generation
        self._owned = assignment.partitions
        await self._watched(self._on_assigned(assignment))
        if self in self._group.members and self._generation == self._group.generation:
            starts = {place: self._group.committed.get(place) for place in self._owned}
            self._log.positions = {p: self._broker.log(p).begin if o is None else o for p, o in starts.items()}
        self._broker.notify()

    async def _watched(self, callback: Awaitable[None]) -> None:
        try:
            await callback
        except Exception as error:  # as with Kafka, it must not stop the other members: our `poll` raises it
            self._log.failure = error


class MemoryReader:
    """Reads given partitions in no group."""

    def __init__(self, broker: MemoryBroker, positions: dict[TopicPartition, int]) -> None:
        self._broker = broker
        self._log = _Positions(broker, is_reset_to_earliest=False)
        self._log.positions = positions

    async def poll(self, *, timeout_ms: int, max_records: int = 500) -> Sequence[Record]:
        """Return the next records. Raises StreamExpiredError for an offset that has left the log."""
        return await self._log.poll(timeout_ms, max_records)

    async def end_offsets(self) -> Mapping[TopicPartition, int]:
        """Return the offset after the last record of each partition."""
        self._broker.check_up()
        return {place: self._broker.log(place).end for place in self._log.positions}

    async def begin_offsets(self) -> Mapping[TopicPartition, int]:
        """Return the offset of the first retained record of each partition."""
        self._broker.check_up()
        return {place: self._broker.log(place).begin for place in self._log.positions}

    def position(self, place: TopicPartition) -> int:
        """Return the offset of the next record that `poll` will hand out."""
        return self._log.positions[place]

    def seek(self, place: TopicPartition, offset: int) -> None:
        """Go on from `offset`."""
        self._log.positions[place] = offset
        self._broker.notify()

    async def close(self) -> None:
        """Close; there is nothing to release."""
