"""Consumer groups of the in-memory broker: members, generations, eager rebalance, committed offsets.

Faithful where it matters: every rebalance revokes everything from everybody, raises the generation by one and assigns
anew; a commit of a member whose generation has passed is refused. The invariant: a partition has at most one owner.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from streams.assignor import Subscriber, assign_group
from streams.broker import Assignment, TopicPartition


class Member(Protocol):
    """What a group asks of its members."""

    name: str
    topics: frozenset[str]

    def crash(self) -> None:
        """Never hand out a record again, as a process that is gone."""
        ...

    async def revoke(self) -> None:
        """Take every partition back, calling the member's callback first."""
        ...

    async def assign(self, assignment: Assignment) -> None:
        """Give partitions, calling the member's callback before records are handed out."""
        ...


class MemoryGroup:
    """One consumer group."""

    def __init__(self, end_offset: Callable[[TopicPartition], int]) -> None:
        self.generation = 0
        self.committed: dict[TopicPartition, int] = {}
        self.members: list[Member] = []
        self._end_offset = end_offset
        self._rebalancing = asyncio.Lock()

    async def join(self, member: Member, places: Callable[[str], Iterable[TopicPartition]]) -> None:
        """Add a member and rebalance; returns when every member has its partitions."""
        async with self._rebalancing:
            await self._revoke()
            self.members.append(member)
            await self._assign(places)

    async def remove(self, member: Member, places: Callable[[str], Iterable[TopicPartition]]) -> None:
        """Remove a member, at once and without its callbacks, and rebalance the rest."""
        if member not in self.members:
            return
        self.members.remove(member)
        async with self._rebalancing:
            await self._revoke()
            await self._assign(places)

    async def rebalance(self, places: Callable[[str], Iterable[TopicPartition]]) -> None:
        """Rebalance with the members as they are."""
        async with self._rebalancing:
            await self._revoke()
            await self._assign(places)

    def commit(self, member: Member, generation: int, offsets: Mapping[TopicPartition, int]) -> bool:
        """Store offsets; False if the member or its generation has passed."""
        if member not in self.members or generation != self.generation:
            return False
        self.committed.update(offsets)
        return True

    async def _revoke(self) -> None:
        await asyncio.gather(*(member.revoke() for member in self.members))

    async def _assign(self, places: Callable[[str], Iterable[TopicPartition]]) -> None:
        self.generation += 1
        topics = {topic for member in self.members for topic in member.topics}
        subscribers = {
            f"{member.name}-{number}": Subscriber(name=member.name, topics=member.topics)
            for number, member in enumerate(self.members)
        }
        shares = assign_group(subscribers, {topic: places(topic) for topic in topics})
        assignments = [self._assignment(shares[member_id]) for member_id in subscribers]
        await asyncio.gather(*(m.assign(a) for m, a in zip(list(self.members), assignments, strict=True)))

    def _assignment(self, share: frozenset[TopicPartition]) -> Assignment:
        ends = {place: self._end_offset(place) for place in share}
        return Assignment(generation=self.generation, partitions=share, end_offsets=ends)
