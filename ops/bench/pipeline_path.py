"""The whole path with a scripted engine: how much it carries on Kafka, and what Kafka adds to the first token.

The same router, stand-ins for intent and retrieval, generation and client run twice: as processes on Kafka, and all in
this process on the in-memory log. The difference is what Kafka, its client and the processes cost.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import yaml

from ops.bench.chaos.annotators import build_or_stand_in
from ops.bench.chaos.processes import Workers, bare_environment
from ops.bench.chaos.stack import PRODUCTION, Size, configuration
from ops.bench.pipeline_meter import cpu_s, num_written
from ops.errors import CommandError
from schemas.envelope import REQUEST_ID, header
from schemas.worker import Pool
from streams.broker import Broker, LogReader, TopicPartition
from streams.cancellations import Cancellations
from streams.client import ClientSettings, GeaClient
from streams.memory import MemoryBroker
from streams.reading import read_until
from streams.topics import TOKENS, pool_topic, topic_specs
from workers.build import FAKE_MODULES
from workers.connect import limits_of
from workers.outbox import Outbox
from workers.runtime import Worker
from workers.settings import Settings, load_settings

COLOUR = "blue"
READY_S = 60.0
TIMEOUT_S = 60.0
SIZE = Size(num_generation=1, num_routers=1, pace_ms=0.0, sessions=PRODUCTION)
HOPS = ("client_router", "router_intent", "intent_retrieval", "retrieval_generation", "generation_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a number of requests at once came to. `cpu_s` counts the workers' processes, not Kafka's or the client's."""

    num_requests: int
    num_token_records: int
    seconds: float
    cpu_s: float

    def figures(self) -> dict[str, float]:
        """Return rates by wall time, and by second of the workers' CPU time: what one busy core carries."""
        return {
            "requests_per_s": round(self.num_requests / self.seconds, 1),
            "token_records_per_s": round(self.num_token_records / self.seconds, 1),
            "requests_per_core_s": round(self.num_requests / max(self.cpu_s, 1e-3), 1),
            "token_records_per_core_s": round(self.num_token_records / max(self.cpu_s, 1e-3), 1),
            "cores_busy": round(self.cpu_s / self.seconds, 2),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Passage:
    """One request on the idle stack, in milliseconds: until its first text, and hop by hop."""

    ttft_ms: float
    hops_ms: tuple[float, ...]


@asynccontextmanager
async def worker_processes(folder: Path, config: Path) -> AsyncIterator[Workers]:
    """One process for each pool, ready."""
    workers = Workers(folder, config, bare_environment(), FAKE_MODULES)
    workers.prepare()
    try:
        if (late := await workers.start_all(SIZE.names, READY_S)) is not None:
            raise CommandError(f"{late.name} did not become ready", details=_tail(late.log))
        yield workers
    finally:
        await workers.close()


@asynccontextmanager
async def workers_in_process(settings: Settings) -> AsyncIterator[MemoryBroker]:
    """The same pools in this process on a log in memory, ready."""
    stop = asyncio.Event()
    async with AsyncExitStack() as stack:
        broker = MemoryBroker()
        await broker.create_topics(topic_specs(SIZE.num_partitions))
        workers = [await _worker(pool, settings, broker, stack) for pool in Pool]
        running = [asyncio.create_task(worker.run(stop)) for worker in workers]
        try:
            async with asyncio.timeout(READY_S):
                for worker in workers:
                    await worker.ready.wait()
            yield broker
        finally:
            stop.set()
            await asyncio.gather(*running, return_exceptions=True)


async def _worker(pool: Pool, settings: Settings, broker: Broker, stack: AsyncExitStack) -> Worker:
    outbox = Outbox(await broker.producer(), worker_id=f"{pool}-1", num_token_partitions=SIZE.num_partitions)
    cancellations = Cancellations()
    handler = await build_or_stand_in(pool, settings, broker, outbox, stack, colour=COLOUR, cancellations=cancellations)
    return Worker(broker, handler, outbox, worker_id=f"{pool}-1", colour=COLOUR, limits=limits_of(settings, pool))


def write_settings(folder: Path, bootstrap: str, redis_url: str) -> tuple[Path, Settings]:
    """Write the configuration of all workers; the engine does not pause between tokens."""
    (folder / "workers").mkdir()
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(configuration(SIZE, bootstrap, redis_url)))
    return config, load_settings(config, {})


async def carry(client: GeaClient, broker: Broker, workers: Workers, *, num_requests: int, at_once: int) -> Load:
    """Ask many requests, `at_once` of them at a time, and count what that came to."""
    processes = [psutil.Process(each.process.pid) for each in workers.running.values()]
    reader = await broker.reader({TopicPartition(TOKENS, p): None for p in range(SIZE.num_partitions)})
    try:
        num_before, cpu_before, began = await num_written(reader), cpu_s(*processes), time.monotonic()
        await _ask(client, num_requests, at_once)
        seconds, used_s = time.monotonic() - began, cpu_s(*processes) - cpu_before
        num_records = await num_written(reader) - num_before
    finally:
        await reader.close()
    return Load(num_requests=num_requests, num_token_records=num_records, seconds=seconds, cpu_s=used_s)


async def _ask(client: GeaClient, num_requests: int, at_once: int) -> None:
    left = iter(range(num_requests))

    async def ask_on() -> None:
        for number in left:
            await client.complete(f"question {number}: when are shoes returned?")

    await asyncio.gather(*(ask_on() for _ in range(at_once)))


async def pass_alone(client: GeaClient, broker: Broker, num_requests: int, say: Callable[[str], None]) -> list[Passage]:
    """Ask one request after another, each when the one before has ended, and follow each over its hops."""
    places = {TopicPartition(topic, p): None for topic in _topics() for p in range(SIZE.num_partitions)}
    reader = await broker.reader(dict(places))
    asked: dict[str, tuple[float, float]] = {}
    try:
        for number in range(num_requests):
            request_id = f"alone-{number}-{time.time_ns()}"
            began, began_wall = time.perf_counter(), time.time() * 1000
            async with client.generate(f"question {number}", request_id=request_id) as stream:
                async for chunk in stream:
                    if chunk.text and request_id not in asked:
                        asked[request_id] = (began_wall, (time.perf_counter() - began) * 1000)
            if number % 25 == 24:
                say(f"{number + 1} of {num_requests} requests, one at a time")
        written = await _times(reader, set(asked))
    finally:
        await reader.close()
    return [
        Passage(ttft_ms=ttft_ms, hops_ms=hops(began_ms, written[request_id], began_ms + ttft_ms))
        for request_id, (began_ms, ttft_ms) in asked.items()
        if len(written.get(request_id, ())) == len(HOPS)
    ]


def hops(asked_ms: float, written_ms: Sequence[float], shown_ms: float) -> tuple[float, ...]:
    """Return the time of each hop: from one record to the next, the client at both ends.

    `written_ms` are the times at which a request's records were produced: to the router, intent, retrieval, generation,
    and its first token record. A hop holds the work of its stage, which is next to nothing here, and the broker's part.
    """
    steps = [*written_ms[1:], shown_ms]
    return tuple(max(0.0, after - before) for before, after in zip((asked_ms, *steps[:-1]), steps, strict=True))


def _topics() -> list[str]:
    return [*(pool_topic(pool, COLOUR) for pool in Pool), TOKENS]


async def _times(reader: LogReader, request_ids: set[str]) -> dict[str, list[float]]:
    """Return for each request when its record was produced to each topic of the path, the first in each."""
    seen: dict[str, dict[str, float]] = {}
    async for records in read_until(reader, await reader.end_offsets(), timeout_ms=1_000):
        for record in records:
            request_id = (
                (record.key or b"").decode() if record.topic == TOKENS else header(record.headers, REQUEST_ID) or ""
            )
            if request_id in request_ids:
                seen.setdefault(request_id, {}).setdefault(record.topic, float(record.timestamp_ms))
    order = _topics()
    return {request_id: [at[topic] for topic in order if topic in at] for request_id, at in seen.items()}


def _tail(log: Path) -> tuple[str, ...]:
    return tuple(log.read_text(errors="replace").splitlines()[-5:]) if log.exists() else ()


def client_of(broker: str | Broker) -> GeaClient:
    """Return a client of either installation."""
    return GeaClient(broker, ClientSettings(timeout_s=TIMEOUT_S, connect_s=10.0))
