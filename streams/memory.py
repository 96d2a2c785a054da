"""A broker in memory: the protocols of `streams.broker` without a server, for tests and for trying things out.

Behaves as Kafka does where our code can tell: partitions, headers, murmur2, consumer groups with generations and eager
rebalance, retention and compaction. It can also do what a test cannot ask of a server: be `down`, `kill` a member,
`expire` records, make `members` stuck. Nothing sleeps: `poll` waits for events, `until` lets a test wait for a state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

from schemas.envelope import Headers
from schemas.errors import BrokerUnavailableError, InvalidRequestError
from streams.broker import AssignedCallback, Record, RevokedCallback, TopicPartition, TopicSpec
from streams.clock import now_ms
from streams.memory_clients import MemoryGroupConsumer, MemoryProducer, MemoryReader
from streams.memory_group import MemoryGroup
from streams.memory_log import MAX_MESSAGE_BYTES, MemoryPartition
from streams.routing import murmur2_partition


class MemoryBroker:
    """A log in this process. `clock_ms` gives the records their timestamps."""

    def __init__(self, clock_ms: Callable[[], int] = now_ms) -> None:
        self._clock_ms = clock_ms
        self._topics: dict[str, list[MemoryPartition]] = {}
        self._groups: dict[str, MemoryGroup] = {}
        self._changed = asyncio.Event()
        self._is_down = False
        self._num_keyless = 0

    @property
    def name(self) -> str:
        """Return what the broker is, for people."""
        return "in-memory broker"

    @property
    def down(self) -> bool:
        """Whether every call fails with BrokerUnavailableError; settable."""
        return self._is_down

    @down.setter
    def down(self, value: bool) -> None:
        self._is_down = value
        self.notify()

    async def producer(self) -> MemoryProducer:
        """Make a producer. The caller closes it."""
        self.check_up()
        return MemoryProducer(self)

    async def group_consumer(
        self,
        topics: Sequence[str],
        *,
        group: str,
        member: str,
        on_revoked: RevokedCallback,
        on_assigned: AssignedCallback,
    ) -> MemoryGroupConsumer:
        """Join a group; returns when this member has its partitions. The caller closes it."""
        self.check_up()
        for topic in topics:
            self._partitions_of(topic)
        consumer = MemoryGroupConsumer(self, self.group(group), member, topics, on_revoked, on_assigned)
        await self.group(group).join(consumer, self.places)
        return consumer

    async def reader(self, places: Mapping[TopicPartition, int | None]) -> MemoryReader:
        """Read partitions from offsets (None: from the end). The caller closes it."""
        self.check_up()
        ends = {place: self.log(place).end for place in places}
        return MemoryReader(self, {p: ends[p] if offset is None else offset for p, offset in places.items()})

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions, 0 if there is no such topic."""
        self.check_up()
        return len(self._topics.get(topic, ()))

    async def create_topics(self, specs: Sequence[TopicSpec]) -> Sequence[str]:
        """Create the topics that are missing and return their names."""
        self.check_up()
        missing = [spec for spec in specs if spec.name not in self._topics]
        for spec in missing:
            limit = int(dict(spec.settings).get("max.message.bytes", MAX_MESSAGE_BYTES))
            places = (TopicPartition(spec.name, number) for number in range(spec.num_partitions))
            self._topics[spec.name] = [MemoryPartition(place, limit) for place in places]
        return [spec.name for spec in missing]

    async def kill(self, member: str) -> None:
        """Crash every member of that name: none of its callbacks is called, the others get its partitions."""
        for group in self._groups.values():
            for each in [each for each in group.members if each.name == member]:
                each.crash()
                await group.remove(each, self.places)

    def members(self, member: str) -> Sequence[MemoryGroupConsumer]:
        """Return the group members of that name, in whatever group: a test can make them stuck or unheard."""
        found = (each for group in self._groups.values() for each in group.members if each.name == member)
        return [each for each in found if isinstance(each, MemoryGroupConsumer)]

    async def rebalance(self, group: str) -> None:
        """Let a group go through one rebalance with its members as they are."""
        await self.group(group).rebalance(self.places)

    def compact(self, topic: str) -> None:
        """Keep only the last record of each key."""
        for log in self._partitions_of(topic):
            log.compact()

    def expire(self, topic: str, partition: int, before: int) -> None:
        """Let the records below offset `before` leave the topic; wakes readers that stand there."""
        self.log(TopicPartition(topic, partition)).expire(before)
        self.notify()

    def committed(self, group: str, place: TopicPartition) -> int | None:
        """Return the committed offset of a group, None if there is none."""
        return self.group(group).committed.get(place)

    def records(self, topic: str) -> Sequence[Record]:
        """Return everything that a topic holds, partition by partition."""
        return [record for log in self._partitions_of(topic) for record in log.read(log.begin, log.end)]

    async def until(self, is_true: Callable[[], bool]) -> None:
        """Wait until a condition on this broker holds: it is asked after every append, commit and rebalance."""
        while not is_true():
            await self._changed.wait()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return None

    # For the producers, consumers and readers of this module.

    def append(
        self, topic: str, value: bytes | None, key: bytes | None, headers: Headers, partition: int | None
    ) -> Record:
        """Append one record where its partition or key says."""
        self.check_up()
        logs = self._topics.get(topic)
        if logs is None:
            raise InvalidRequestError(f"there is no topic {topic}", field="topic")
        if partition is None:
            partition = self._next_keyless(len(logs)) if key is None else murmur2_partition(key, len(logs))
        if not 0 <= partition < len(logs):
            raise InvalidRequestError(f"partition: {topic} has no partition {partition}", field="partition")
        record = logs[partition].append(self._clock_ms(), key, value, tuple(headers))
        self.notify()
        return record

    def log(self, place: TopicPartition) -> MemoryPartition:
        """Return one partition. Raises BrokerUnavailableError if there is none."""
        logs = self._partitions_of(place.topic)
        if not 0 <= place.partition < len(logs):
            raise BrokerUnavailableError(f"{place.topic} has no partition {place.partition}")
        return logs[place.partition]

    def places(self, topic: str) -> list[TopicPartition]:
        """Return the partitions of a topic."""
        return [TopicPartition(topic, number) for number in range(len(self._topics.get(topic, ())))]

    def group(self, name: str) -> MemoryGroup:
        """Return a group, made on first use."""
        if name not in self._groups:
            self._groups[name] = MemoryGroup(lambda place: self.log(place).end)
        return self._groups[name]

    def check_up(self) -> None:
        """Raise BrokerUnavailableError while the broker is down."""
        if self._is_down:
            raise BrokerUnavailableError("the broker is down")

    def notify(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait(self, timeout_s: float) -> bool:
        """Wait for the next change; False if none came in time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return False
        return True

    def _partitions_of(self, topic: str) -> list[MemoryPartition]:
        if topic not in self._topics:
            raise BrokerUnavailableError(f"there is no topic {topic}")
        return self._topics[topic]

    def _next_keyless(self, num_partitions: int) -> int:
        self._num_keyless += 1
        return self._num_keyless % num_partitions
