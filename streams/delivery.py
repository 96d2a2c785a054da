"""A record on its way through a worker, and the partition that it came from, while that is ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from streams.broker import Record, TopicPartition
from streams.offsets import OffsetTracker

SMOOTHING = 0.1  # weight of the newest record


class Ownership:
    """One partition while it is ours without a break."""

    def __init__(self, generation: int, end_offset: int, is_leased: Callable[[], bool]) -> None:
        self.generation = generation
        self.end_offset = end_offset
        self.is_leased = is_leased
        self.tracker = OffsetTracker()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.is_lost = False
        self.committed: int | None = None
        self.base: int | None = None  # where reading began when the partition became ours; asked for the lag only

    def uncommitted(self) -> int | None:
        """Return the offset to commit, None if that is committed already."""
        offset = self.tracker.committable()
        return None if offset == self.committed else offset

    def lag(self, end: int) -> int:
        """Return the records before `end` that are not committed; 0 while it is not known where reading began."""
        return 0 if self.base is None else max(0, end - max(self.committed or 0, self.base))

    def num_unread(self, end: int) -> int:
        """Return the records before `end` that were not received; 0 while it is not known where reading began."""
        return 0 if self.base is None else max(0, end - max(self.tracker.end, self.committed or 0, self.base))

    def lose(self) -> None:
        """Cancel the work of the partition; what it acknowledges later has no effect."""
        self.is_lost = True
        for task in list(self.tasks):
            task.cancel()


class Delivery:
    """One record, to be handled and then acknowledged by `done`."""

    __slots__ = ("_on_done", "_ownership", "generation", "has_failed", "is_takeover", "received_at", "record")

    def __init__(
        self, record: Record, ownership: Ownership, received_at: float, on_done: Callable[[Delivery], None]
    ) -> None:
        self.record = record
        self.received_at = received_at
        self.generation = ownership.generation
        """The group's generation when the partition was given to us."""
        self.is_takeover = record.offset < ownership.end_offset
        """The record was there when the partition became ours: an earlier owner may have begun it."""
        self.has_failed = False
        """Whether this worker failed at it, by no fault of the record."""
        self._ownership = ownership
        self._on_done = on_done

    def is_current(self) -> bool:
        """Return whether the partition is, as far as we know, still ours without a break."""
        return not self._ownership.is_lost

    def is_leased(self) -> bool:
        """Return whether the partition surely is ours still: nobody else can have been given it yet.

        Fresh work begins only while this holds. A worker that was paused learns here that it may have lost everything.
        """
        return self.is_current() and self._ownership.is_leased()

    def fail(self) -> None:
        """Note that this worker failed at the record by its own fault; it counts when the record is acknowledged."""
        self.has_failed = True

    def done(self) -> None:
        """Acknowledge: the offset may be committed from now on. Idempotent; without effect if the partition is lost."""
        if not self._ownership.is_lost and self._ownership.tracker.finish(self.record.offset):
            self._on_done(self)

    def attach(self, task: asyncio.Task[Any]) -> None:
        """Have `task` cancelled when the partition is lost; at once if it is lost already."""
        if self._ownership.is_lost:
            task.cancel()
            return
        self._ownership.tasks.add(task)
        task.add_done_callback(self._ownership.tasks.discard)


class Outcomes:
    """How a worker fares with its records, smoothed; empty before the first."""

    def __init__(self) -> None:
        self.request_ms = 0.0
        """From receipt to acknowledgement."""
        self.error_rate = 0.0
        """The share that the worker failed at."""
        self._is_empty = True

    def add(self, delivery: Delivery, now: float) -> None:
        """Count an acknowledgement; `now` is the event loop's time."""
        took_ms = (now - delivery.received_at) * 1000
        self.request_ms = took_ms if self._is_empty else _smoothed(self.request_ms, took_ms)
        self.error_rate = _smoothed(self.error_rate, float(delivery.has_failed))
        self._is_empty = False


def _smoothed(before: float, newest: float) -> float:
    return before + SMOOTHING * (newest - before)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerStatistics:
    """A consumer at one moment. `lag` counts records that are not committed yet, None if unknown."""

    num_partitions: int
    num_paused: int
    num_in_flight: int
    num_waiting: int
    num_delivered: int
    num_committed: int
    generation: int
    lag: int | None
    last_poll_at: float
    """The event loop's time of the last completed poll."""
    partitions: frozenset[TopicPartition] = frozenset()
    request_ms: float = 0.0
    """From receipt to acknowledgement, smoothed."""
    error_rate: float = 0.0
    """The share of acknowledged records that this worker failed at, smoothed."""
    num_behind: int = 0
    """Records in our partitions, as far as we know, that nobody works on."""
    num_rebuilds: int = 0
    """How often a stuck member was replaced."""
