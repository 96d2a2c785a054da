"""Which partition a request goes to: in turn, or to the worker where it will be done soonest.

Turns of a session keep their key always, also while the owner of their partition drains: a later turn in another
partition could overtake an earlier one, and the next owner begins with the oldest. Never waits and needs no worker:
what is not known yet is decided by the key or in turn.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Protocol

from schemas.envelope import RoutedRequest
from schemas.errors import ConfigError, UnavailableError
from schemas.worker import Pool, WorkerState, WorkerStatus
from streams.broker import Broker
from streams.racing import end_tasks
from streams.topics import pool_topic
from workers.router.backlog import Backlog
from workers.router.cost import MeanTokens, estimate_tokens

DEFAULT_PACE_S = 1.0  # before any worker has finished a request: only backlogs are compared
AVOIDED = frozenset({WorkerState.DRAINING, WorkerState.SUSPENDED, WorkerState.FAILED})


class Workers(Protocol):
    """Who works, as `streams.directory.Directory` knows it."""

    def workers(
        self, pool: Pool | None = None, colour: str | None = None, state: WorkerState | None = WorkerState.READY
    ) -> tuple[WorkerStatus, ...]:
        """Return the workers that live; `state=None` means any."""
        ...


class PartitionCounts:
    """Partition counts of topics, asked for in the background the first time that one is needed."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._counts: dict[str, int] = {}
        self._asking: dict[str, asyncio.Task[None]] = {}

    def get(self, topic: str) -> int | None:
        """Return the count, None while it is not known."""
        count = self._counts.get(topic)
        if count is None and topic not in self._asking:
            self._asking[topic] = asyncio.create_task(self._ask(topic))
        return count

    async def close(self) -> None:
        """Stop asking. Idempotent."""
        await end_tasks(*self._asking.values())

    async def _ask(self, topic: str) -> None:
        try:
            count = await self._broker.partitions(topic)
        except (UnavailableError, ConfigError):
            count = 0
        finally:
            self._asking.pop(topic, None)  # the next request asks again where there is no answer
        if count:
            self._counts[topic] = count


class Turn:
    """Goes round a set that may change."""

    def __init__(self) -> None:
        self._last = -1

    def next(self, partitions: Sequence[int]) -> int:
        """Return the first partition after the last one, of a sorted sequence that is not empty."""
        self._last = next((number for number in partitions if number > self._last), partitions[0])
        return self._last


class RoundRobin:
    """All partitions in turn, without those whose owner takes no more, where there are others."""

    def __init__(self, workers: Workers, num_partitions: Callable[[str], int | None]) -> None:
        self._workers = workers
        self._num_partitions = num_partitions
        self._turns: dict[str, Turn] = {}

    def partition(self, topic: str, routed: RoutedRequest) -> int | None:
        """Return the next partition; None for a turn of a session, or while the topic is unknown."""
        count = self._num_partitions(topic)
        if routed.request.session_id is not None or count is None:
            return None
        avoided = {p for status in self._statuses(topic, routed) if status.state in AVOIDED for p in status.partitions}
        free = [number for number in range(count) if number not in avoided] or list(range(count))
        return self._turns.setdefault(topic, Turn()).next(free)

    def _statuses(self, topic: str, routed: RoutedRequest) -> tuple[WorkerStatus, ...]:
        pool = pool_of(topic, routed)
        return self._workers.workers(pool, getattr(routed.route, pool.value), None) if pool is not None else ()


class LeastLoad:
    """The worker with the least expected time, then one of its partitions in turn; without any, all in turn."""

    def __init__(
        self,
        workers: Workers,
        num_partitions: Callable[[str], int | None],
        *,
        max_length: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._num_partitions = num_partitions
        self._max_length = max_length
        self._clock = clock
        self._fallback = RoundRobin(workers, num_partitions)
        self._backlogs: dict[str, Backlog] = {}
        self._known: dict[tuple[Pool, str], tuple[tuple[WorkerStatus, ...], dict[str, tuple[int, ...]]]] = {}
        self._turns: dict[str, Turn] = {}
        self._mean_tokens = MeanTokens()
        self._num_chosen = 0

    def partition(self, topic: str, routed: RoutedRequest) -> int | None:
        """Return a partition of the best worker; None for a turn of a session, or while the topic is unknown."""
        count, pool = self._num_partitions(topic), pool_of(topic, routed)
        if routed.request.session_id is not None or count is None:
            return None
        tokens = estimate_tokens(routed.request, max_length=self._max_length)
        self._mean_tokens.add(tokens)
        owners = self._owners(pool, getattr(routed.route, pool.value), count) if pool is not None else {}
        if not owners:
            return self._fallback.partition(topic, routed)
        best = self._choose(owners, tokens / self._mean_tokens.value if pool is Pool.GENERATION else 1.0)
        return self._turns.setdefault(best, Turn()).next(owners[best])

    def _choose(self, owners: dict[str, tuple[int, ...]], own_work: float) -> str:
        now_s = self._clock()
        paces = [pace for name in owners if (pace := self._backlogs[name].pace_s) is not None]
        pool_pace_s = median(paces) if paces else DEFAULT_PACE_S
        self._num_chosen += 1  # equals take turns
        names = sorted(owners)
        shift = self._num_chosen % len(names)
        best = min(
            (*names[shift:], *names[:shift]),
            key=lambda name: self._backlogs[name].expected_s(now_s, pool_pace_s),
        )
        self._backlogs[best].send(now_s, own_work, pool_pace_s)
        return best

    def _owners(self, pool: Pool, colour: str, count: int) -> dict[str, tuple[int, ...]]:
        """Return the partitions of every worker that takes work; the newest status counts for each partition."""
        statuses = self._workers.workers(pool, colour, None)
        known = self._known.get((pool, colour))
        if known is not None and known[0] == statuses:
            return known[1]
        self._forget({status.worker_id for status in self._workers.workers(state=None)})
        for status in statuses:
            self._backlogs.setdefault(status.worker_id, Backlog()).take(status, self._clock(), self._mean_tokens.value)
        owner_of = {p: s for s in sorted(statuses, key=lambda s: s.updated_ms) for p in s.partitions if 0 <= p < count}
        owners = _by_owner(owner_of.items())
        self._known[pool, colour] = (statuses, owners)
        return owners

    def _forget(self, living: set[str]) -> None:
        for name in self._backlogs.keys() - living:
            del self._backlogs[name]
            self._turns.pop(name, None)


def _by_owner(owner_of: Iterable[tuple[int, WorkerStatus]]) -> dict[str, tuple[int, ...]]:
    found: dict[str, list[int]] = {}
    for partition, status in sorted(owner_of, key=lambda item: item[0]):
        if status.state is WorkerState.READY:
            found.setdefault(status.worker_id, []).append(partition)
    return {name: tuple(partitions) for name, partitions in found.items()}


def pool_of(topic: str, routed: RoutedRequest) -> Pool | None:
    """Return which pool reads a topic, None if none of the request's route does."""
    for pool in (Pool.INTENT, Pool.RETRIEVAL, Pool.GENERATION):
        if topic == pool_topic(pool, getattr(routed.route, pool.value)):
            return pool
    return None
