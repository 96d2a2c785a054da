"""What GEA needs of a log, as protocols: `streams.kafka` is the real one, `streams.memory` ships with it.

Both pass the same contract tests. Foreign errors are translated here: every method raises BrokerUnavailableError when
the broker does not answer in the bounded time of `Timeouts`, and InvalidRequestError for a record that is too large.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import NamedTuple, Protocol, Self

import msgspec

from schemas.envelope import Headers


class TopicPartition(NamedTuple):
    """One partition of a topic."""

    topic: str
    partition: int


class Record(msgspec.Struct, frozen=True, kw_only=True):  # made once or twice per message: a dataclass costs thrice
    """One record as it was read. `value` None is a tombstone."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()

    @property
    def place(self) -> TopicPartition:
        """Return the partition that the record stands in."""
        return TopicPartition(self.topic, self.partition)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicSpec:
    """How a topic is created. `settings` are Kafka's topic configs."""

    name: str
    num_partitions: int
    replication: int = 1
    settings: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """Partitions given to a group member, the group's generation at that moment, and each partition's end offset then.

    A record below `end_offsets[partition]` may have been handed to an earlier owner: its work may be a take-over.
    """

    generation: int
    partitions: frozenset[TopicPartition]
    end_offsets: Mapping[TopicPartition, int]


RevokedCallback = Callable[[frozenset[TopicPartition]], Awaitable[None]]
AssignedCallback = Callable[[Assignment], Awaitable[None]]


class Producer(Protocol):
    """Writes records; keeps the order of one partition."""

    async def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        headers: Headers = (),
        partition: int | None = None,
    ) -> Record:
        """Append one record, wait for the acknowledgement of all replicas and return it with its place.

        Without `partition` the key decides (murmur2, as Kafka's own clients do). Raises InvalidRequestError for a
        topic or partition that does not exist, which is never created.
        Safe to cancel: the record may or may not have been written.
        """
        ...

    async def close(self) -> None:
        """Flush and close, in bounded time. Idempotent."""
        ...


class GroupConsumer(Protocol):
    """A member of a consumer group. One task polls; `pause` keeps polling alive."""

    async def poll(self, *, timeout_ms: int, max_records: int) -> Sequence[Record]:
        """Return the next records of the partitions that are not paused, in order per partition; may be empty."""
        ...

    async def commit(self, offsets: Mapping[TopicPartition, int]) -> bool:
        """Commit the next offset to read of each partition. False: the group has moved on and nothing was committed."""
        ...

    async def committed(self, place: TopicPartition) -> int | None:
        """Return the committed offset, None if there is none."""
        ...

    async def end_offsets(self, places: frozenset[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the offset after the last record of each partition."""
        ...

    async def begin_offsets(self, places: frozenset[TopicPartition]) -> Mapping[TopicPartition, int]:
        """Return the offset of the first retained record of each partition."""
        ...

    def assignment(self) -> frozenset[TopicPartition]:
        """Return what this member owns now."""
        ...

    def is_leased(self) -> bool:
        """Return whether the group surely counts this member as the owner of its partitions.

        Its last sign of life, as it was sent, is younger than the session timeout by a margin. The clock decides: a
        process that was paused gets False before it hears that it was thrown out.
        """
        ...

    async def check_group(self) -> None:
        """Look now whether the group has changed, and not only at the next heartbeat. It may then rebalance."""
        ...

    def is_alive(self) -> bool:
        """Return whether this member can still take part in the group; one that cannot has to be replaced."""
        ...

    def pause(self, places: frozenset[TopicPartition]) -> None:
        """Stop handing out records of these partitions; unknown ones are ignored. Lost at a rebalance."""
        ...

    def resume(self, places: frozenset[TopicPartition]) -> None:
        """Hand out records of these partitions again; unknown ones are ignored."""
        ...

    async def close(self) -> None:
        """Leave the group and close, in bounded time. Idempotent."""
        ...


class LogReader(Protocol):
    """Reads given partitions from given offsets, in no group, committing nothing."""

    async def poll(self, *, timeout_ms: int, max_records: int = 500) -> Sequence[Record]:
        """Return the next records, in order per partition; may be empty."""
        ...

    async def end_offsets(self) -> Mapping[TopicPartition, int]:
        """Return the offset after the last record of each partition that is read."""
        ...

    async def begin_offsets(self) -> Mapping[TopicPartition, int]:
        """Return the offset of the first retained record of each partition that is read."""
        ...

    def position(self, place: TopicPartition) -> int:
        """Return the offset of the next record that `poll` will hand out."""
        ...

    def seek(self, place: TopicPartition, offset: int) -> None:
        """Go on from `offset`."""
        ...

    async def close(self) -> None:
        """Close in bounded time. Idempotent."""
        ...


class Broker(Protocol):
    """A connection to a log: makes producers, group consumers and readers. `async with` opens and closes it."""

    @property
    def name(self) -> str:
        """Return what the broker is, for people."""
        ...

    async def producer(self) -> Producer:
        """Make a started producer. The caller closes it."""
        ...

    async def group_consumer(
        self,
        topics: Sequence[str],
        *,
        group: str,
        member: str,
        on_revoked: RevokedCallback,
        on_assigned: AssignedCallback,
    ) -> GroupConsumer:
        """Join a group under the stable name `member`. The caller closes it.

        A group without a committed offset starts at the earliest record. Both callbacks are awaited before records of
        the new assignment are handed out; they must not wait for the task that polls.
        """
        ...

    async def reader(self, places: Mapping[TopicPartition, int | None]) -> LogReader:
        """Read partitions from offsets (None: from the end). The caller closes it.

        An offset that has expired raises StreamExpiredError from `poll`.
        """
        ...

    async def partitions(self, topic: str) -> int:
        """Return the number of partitions, 0 if there is no such topic."""
        ...

    async def create_topics(self, specs: Sequence[TopicSpec]) -> Sequence[str]:
        """Create the topics that are missing and return their names."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None: ...
