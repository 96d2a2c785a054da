"""What is left when nothing is to be done: tokens, queues, tasks, uncommitted offsets. All of it must be nothing.

A task counts as left over if its kind never occurs in a worker that is idle from the start, or if there are clearly
more of a kind than there were.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from ops.bench.chaos.processes import WorkerProcess
from ops.bench.chaos.stack import ChaosStack
from schemas.errors import GeaError
from schemas.worker import Pool
from streams.broker import TopicPartition
from streams.clock import now_ms
from streams.topics import pool_group, pool_topic

SETTLE_S = 2.0  # commits come each second, a census each half
PATIENCE_S = 30.0
STOP_S = 25.0
SPARE_TASKS = 4  # connections and requests of Kafka's client come and go
LOOSE = ("Task was destroyed", "exception was never retrieved", "was never awaited")


@dataclass(slots=True, kw_only=True)
class Leaks:
    """What was still there at the end. `tokens` are those of sequences that an engine still holds."""

    tokens: int = 0
    queued: int = 0
    tasks: Counter[str] = field(default_factory=Counter)
    uncommitted: int = 0

    @property
    def is_clean(self) -> bool:
        """Return whether nothing was left."""
        return not (self.tokens or self.queued or self.tasks or self.uncommitted)


async def idle_tasks(stack: ChaosStack) -> Mapping[Pool, Counter[str]]:
    """Return how many tasks of each kind a worker of each pool has while there is nothing to do."""
    await asyncio.sleep(SETTLE_S)
    found: dict[Pool, Counter[str]] = {}
    for each in stack.workers.running.values():
        census = each.census()
        tasks: Counter[str] = Counter(census["tasks"] if census else {})
        found[each.pool] = found.get(each.pool, Counter()) | tasks
    return found


async def find_leaks(stack: ChaosStack, idle: Mapping[Pool, Counter[str]]) -> Leaks:
    """Wait until nothing is left; return what stays after all patience."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        since_ms = now_ms()
        await asyncio.sleep(SETTLE_S)
        leaks = Leaks(uncommitted=await _uncommitted(stack))
        for each in stack.workers.running.values():
            if each.is_alive and not each.is_asked:
                _add(leaks, each, idle.get(each.pool, Counter()), since_ms)
        if leaks.is_clean or time.monotonic() > deadline:
            return leaks


async def stop_all(stack: ChaosStack) -> list[str]:
    """Stop every worker in order; return those that did not end well, and complaints of Python in their logs."""
    living = [each for each in stack.workers.running.values() if each.is_alive and not each.is_asked]
    codes = await asyncio.gather(*(stack.workers.stop(each, STOP_S) for each in living))
    found = [
        f"{each.name}: exit code {code} at the stop" for each, code in zip(living, codes, strict=True) if code != 0
    ]
    for each in {each.log: each for each in stack.workers.running.values()}.values():
        text = each.log.read_text(errors="replace") if each.log.exists() else ""  # killed before its first word
        found += [f"{each.name}: {complaint!r} in its log" for complaint in LOOSE if complaint in text]
    return found


def left_over(tasks: Mapping[str, int], idle: Mapping[str, int]) -> Counter[str]:
    """Return the tasks that an idle worker does not have. Pure."""
    return Counter(
        {
            name: count - idle.get(name, 0)
            for name, count in tasks.items()
            if name not in idle or count > idle[name] + SPARE_TASKS
        }
    )


def _add(leaks: Leaks, one: WorkerProcess, idle: Mapping[str, int], since_ms: int) -> None:
    census = one.census()
    if census is None or census["at_ms"] < since_ms:
        leaks.tasks[f"{one.name} says nothing"] += 1
        return
    leaks.tokens += census["tokens_in_flight"]
    leaks.queued += census["num_queued"]
    leaks.tasks.update({f"{one.pool}: {name}": count for name, count in left_over(census["tasks"], idle).items()})


async def _uncommitted(stack: ChaosStack) -> int:
    """Return how many records of all pools are not committed."""
    total = 0
    for pool in Pool:
        topic = pool_topic(pool, "blue")
        places = {TopicPartition(topic, number): None for number in range(stack.size.num_partitions)}
        try:
            committed = await stack.groups.committed(pool_group(pool, "blue"))
            reader = await stack.direct.reader(places)
            try:
                ends = await reader.end_offsets()
            finally:
                await reader.close()
        except GeaError:
            return 1  # nobody can say: ask again
        total += sum(end - committed.get(place, 0) for place, end in ends.items())
    return total
