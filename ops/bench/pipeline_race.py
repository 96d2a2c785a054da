"""The same work on GEA's consumer and producer, on FastStream and on Quix Streams: one after another, in turns.

Every entrant is a process of its own, reads the same filled topic in a group of its own, works as each item says, and
writes its result before it acknowledges. Items differ in length by half, so that they finish out of order. What counts
is how fast results stand in the output topic from the moment on that warm-up items are through: loading and joining are
left out.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import psutil

from ops.bench.pipeline_meter import cpu_s, num_written
from ops.errors import CommandError
from streams.broker import Broker, LogReader, Producer, TopicPartition, TopicSpec

HERE = Path(__file__).parent
NUM_WARM_UP = 200
START_S = 30.0
SERIAL_S = 5.0  # one that works item by item may be held up by a long one before all warm-up items are through
PREFILL_AT_ONCE = 2_000
ITEM_BYTES = 100
POLL_S = 0.02

GEA, FASTSTREAM, FASTSTREAM_BATCH, QUIX = "gea", "faststream", "faststream_batch", "quix"
MODES = {
    GEA: "tasks, commits the contiguous offset each second",
    FASTSTREAM: "AckPolicy.ACK, max_workers = partitions (one consumer each), commits each message",
    FASTSTREAM_BATCH: "AckPolicy.ACK, batches handled together, commits each batch",
    QUIX: "at-least-once, one message at a time, commits each second",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A class of items: `work_ms` on average, each between half and one and a half of it."""

    work_ms: int
    num_items: int

    @property
    def topic(self) -> str:
        """Return the topic that holds them."""
        return f"bench.work.{self.work_ms}"


WORKS = (
    Work(work_ms=0, num_items=60_000),
    Work(work_ms=10, num_items=30_000),
    Work(work_ms=100, num_items=8_000),
    Work(work_ms=500, num_items=2_500),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RaceOptions:
    """`peers_python` is the interpreter that has the peers, None to run alone. Each run counts for `window_s`."""

    bootstrap: str
    peers_python: Path | None
    works: Sequence[Work] = WORKS
    num_partitions: int = 16
    in_flight: int = 256
    repeats: int = 3
    window_s: float = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one entrant did in one run."""

    entrant: str
    work_ms: int
    items_per_s: float
    cpu_share: float
    """Of one core, of its own process."""


@dataclass(slots=True)
class Race:
    """Runs everybody in turns. `say` hears what goes on."""

    broker: Broker
    options: RaceOptions
    say: Callable[[str], None]
    runs: list[Run] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    async def run(self) -> list[Run]:
        """Fill the topics and let everybody run; the order turns with each repeat."""
        await self.broker.create_topics([self._spec(work.topic) for work in self.options.works])
        producer = await self.broker.producer()
        try:
            for work in self.options.works:
                self.say(f"filling {work.num_items} items of {work.work_ms} ms")
                await fill(producer, work, self.options.num_partitions)
        finally:
            await producer.close()
        for repeat in range(self.options.repeats):
            for work in self.options.works:
                for entrant in turned(self._entrants(), repeat):
                    self.runs.append(await self._once(entrant, work))
        return self.runs

    def _entrants(self) -> list[str]:
        return list(MODES) if self.options.peers_python is not None else [GEA]

    def _spec(self, topic: str) -> TopicSpec:
        return TopicSpec(name=topic, num_partitions=self.options.num_partitions)

    async def _once(self, entrant: str, work: Work) -> Run:
        number = next(self._numbers)
        output = f"bench.results.{number}"
        self.say(f"{entrant}, {work.work_ms} ms")
        await self.broker.create_topics([self._spec(output)])
        places = {TopicPartition(output, partition): 0 for partition in range(self.options.num_partitions)}
        reader = await self.broker.reader(dict(places))
        try:
            with running(command(entrant, self.options, work.topic, f"bench-{number}", output)) as process:
                items_per_s, cpu_share = await measure(reader, process, entrant, work, self.options.window_s)
        finally:
            await reader.close()
        return Run(entrant=entrant, work_ms=work.work_ms, items_per_s=items_per_s, cpu_share=cpu_share)


def command(entrant: str, options: RaceOptions, topic: str, group: str, output: str) -> list[str]:
    """Return the command of an entrant."""
    where = [options.bootstrap, topic, group, output]
    peers = [str(options.peers_python), "-W", "ignore"]
    match entrant:
        case "gea":
            return [sys.executable, "-m", "ops.bench.pipeline_worker", *where, str(options.in_flight)]
        case "faststream":
            return [*peers, str(HERE / "pipeline_faststream.py"), *where, "workers", str(options.num_partitions)]
        case "faststream_batch":
            return [*peers, str(HERE / "pipeline_faststream.py"), *where, "batch", str(options.in_flight)]
        case _:
            return [*peers, str(HERE / "pipeline_quix.py"), *where]


def turned(entrants: Sequence[str], repeat: int) -> list[str]:
    """Return who runs in which order in a repeat: another one begins each time."""
    at = repeat % len(entrants)
    return [*entrants[at:], *entrants[:at]]


def item(work: Work, number: int, draw: float) -> bytes:
    """Return an item; warm-up items ask for no work. `draw` lies in 0 … 1."""
    duration_us = 0 if number < NUM_WARM_UP else int(work.work_ms * 1000 * (0.5 + draw))
    return b"%d:%d:" % (duration_us, number) + b"x" * (ITEM_BYTES - len(f"{duration_us}:{number}:"))


async def fill(producer: Producer, work: Work, num_partitions: int) -> None:
    """Write the items of a class, the same ones each time."""
    draws = random.Random(work.work_ms)
    items = [item(work, number, draws.random()) for number in range(work.num_items)]
    for begin in range(0, work.num_items, PREFILL_AT_ONCE):
        await asyncio.gather(
            *(
                producer.send(work.topic, items[number], key=b"%d" % number, partition=number % num_partitions)
                for number in range(begin, min(begin + PREFILL_AT_ONCE, work.num_items))
            )
        )


@contextmanager
def running(arguments: Sequence[str]) -> Iterator[psutil.Popen]:
    """A process that is killed at the end: what it has not committed is nobody's loss here."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    process = psutil.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def measure(
    reader: LogReader, process: psutil.Popen, entrant: str, work: Work, window_s: float
) -> tuple[float, float]:
    """Return items a second and the share of a core, from the last warm-up item on, or soon after the first result."""
    began = time.monotonic()
    first = math.inf
    while (before := await num_written(reader)) <= NUM_WARM_UP and time.monotonic() < first + SERIAL_S:
        if before:
            first = min(first, time.monotonic())
        if process.poll() is not None or (not before and time.monotonic() > began + START_S):
            raise CommandError(f"{entrant} did not begin within {START_S:g} s on items of {work.work_ms} ms")
        await asyncio.sleep(POLL_S)
    began, cpu_before = time.monotonic(), cpu_s(process)
    while True:
        await asyncio.sleep(POLL_S)
        after, now = await num_written(reader), time.monotonic()
        if now - began >= window_s or after >= work.num_items:
            return (after - before) / (now - began), (cpu_s(process) - cpu_before) / (now - began)


def summary(runs: Sequence[Run]) -> dict[str, dict[str, object]]:
    """Return by class of work: the median of each entrant, its spread, and the ratio to the best peer.

    The ratio is that of the medians; its spread that of the ratios repeat by repeat.
    """
    return {f"{work_ms}_ms": _of_class(runs, work_ms) for work_ms in dict.fromkeys(run.work_ms for run in runs)}


def _of_class(runs: Sequence[Run], work_ms: int) -> dict[str, object]:
    rates: dict[str, list[float]] = {}
    shares: dict[str, list[float]] = {}
    for run in runs:
        if run.work_ms == work_ms:
            rates.setdefault(run.entrant, []).append(run.items_per_s)
            shares.setdefault(run.entrant, []).append(run.cpu_share)
    found: dict[str, object] = {
        entrant: {
            "items_per_s": round(median(each), 1),
            "min": round(min(each), 1),
            "max": round(max(each), 1),
            "cpu_share": round(median(shares[entrant]), 2),
        }
        for entrant, each in rates.items()
    }
    peers: Mapping[str, list[float]] = {entrant: each for entrant, each in rates.items() if entrant != GEA}
    if peers and GEA in rates:
        best = max(peers, key=lambda entrant: median(peers[entrant]))
        ratios = [own / other for own, other in zip(rates[GEA], peers[best], strict=True)]
        found["best_peer"] = best
        found["ratio"] = round(median(rates[GEA]) / median(peers[best]), 2)
        found["ratio_spread"] = [round(min(ratios), 2), round(max(ratios), 2)]
    return found
