"""An installation in memory: the real router, workers, claims and client, a scripted engine, fixed annotators."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypedDict

import msgspec

from schemas.envelope import RoutedRequest
from schemas.errors import GeaError
from schemas.intent import IntentResult
from schemas.request import Retrieval, Strategy
from schemas.retrieval import Passage, RetrievalResult
from schemas.tokens import TokenRecord
from schemas.worker import Pool
from streams.broker import Broker
from streams.cancellations import Cancellations
from streams.client import ClientSettings, GeaClient
from streams.control_follower import ControlFollower
from streams.directory import Directory
from streams.memory import MemoryBroker
from streams.memory_store import MemoryStore
from streams.session import SessionStore
from streams.settings import ConsumerLimits
from streams.telemetry import Metrics
from streams.token_reader import decode_token
from streams.token_writer import WriterLimits
from streams.topics import TOKENS, pool_topic, topic_specs
from tests.flow.planners import byte_planner
from workers.annotating import AnnotatingHandler
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine_metrics import EngineMetrics
from workers.generation.planning import Planner
from workers.generation.stage import GenerationHandler, GenerationLimits
from workers.handler import Handler
from workers.outbox import Outbox
from workers.router.admission import DoorLimits
from workers.router.placement import LeastLoad, PartitionCounts
from workers.router.retry_mover import RetryMover
from workers.router.stage import RouterHandler
from workers.router.waiting_room import RoomLimits
from workers.runtime import Worker
from workers.stage import StageSnapshot
from workers.suspension import OutlierLimits


class Fixed(TypedDict):
    """A request that goes from the router to the engine at once."""

    strategy: Strategy
    retrieval: Retrieval


DIALOGUE: Fixed = {"strategy": Strategy.DIALOGUE, "retrieval": Retrieval.OFF}
NUM_PARTITIONS = 2
PASSAGE = Passage(text="Shoes can be returned within 30 days.", passage_id="returns-shoes", score=1.0, title="Returns")
LIMITS = DoorLimits(
    max_length=512,
    max_request_bytes=524_288,
    max_queue_depth=100,
    deadline_ms=60_000,
    max_deadline_ms=600_000,
    num_token_partitions={TOKENS: NUM_PARTITIONS},
)


class FixedAnnotator:
    """An annotator that gives every request the same result, or fails; it works while `gate` is open."""

    def __init__(self, pool: Pool, annotate: Callable[[RoutedRequest], RoutedRequest]) -> None:
        self.pool = pool
        self.batches: list[int] = []
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_given_up = 0
        """Batches that were cancelled while they stood at the gate."""
        self._annotate = annotate

    async def start(self) -> None:
        return None

    async def annotate(self, batch: Sequence[RoutedRequest]) -> Sequence[RoutedRequest]:
        self.batches.append(len(batch))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.num_given_up += 1
            raise
        if self.failure is not None:
            raise self.failure
        return [self._annotate(routed) for routed in batch]

    def give_up(self, routed: RoutedRequest, error: Exception) -> RoutedRequest:
        code = error.code if isinstance(error, GeaError) else "internal"
        if self.pool is Pool.INTENT:
            return msgspec.structs.replace(routed, intent=IntentResult(intent="none", confidence=0.0, failure=code))
        return msgspec.structs.replace(routed, retrieval=RetrievalResult(failure=code))

    def snapshot(self) -> StageSnapshot:
        return StageSnapshot(model="fixed")

    async def stop(self) -> None:
        return None


def with_intent(routed: RoutedRequest) -> RoutedRequest:
    intent = IntentResult(intent="return_refund", confidence=0.9, language="en", needs_retrieval=True)
    return msgspec.structs.replace(routed, intent=intent)


def with_passage(routed: RoutedRequest) -> RoutedRequest:
    return msgspec.structs.replace(routed, retrieval=RetrievalResult(passages=(PASSAGE,)))


@dataclass(slots=True)
class RunningWorker:
    worker: Worker
    task: asyncio.Task[None]
    stop: asyncio.Event
    handler: Handler
    cancellations: Cancellations
    control: ControlFollower


class Installation:
    """Topics, a store and workers by name; everything is stopped at the end."""

    def __init__(self) -> None:
        self.broker = MemoryBroker()
        self.store = MemoryStore()
        self.workers: dict[str, RunningWorker] = {}
        self.metrics: dict[str, Metrics] = {}
        self.intent = FixedAnnotator(Pool.INTENT, with_intent)
        self.retrieval = FixedAnnotator(Pool.RETRIEVAL, with_passage)
        self.limits = LIMITS
        self.room_limits = RoomLimits()
        self.consumer_limits = ConsumerLimits(batch_size=8, max_wait_ms=1, commit_interval_ms=20)
        self.planner: Callable[[], Planner] = byte_planner
        self.grace_s = 5.0
        """How long a worker that stops serves what still comes, if it has peers."""
        self.outliers: OutlierLimits | None = None
        """When a worker steps aside; None: workers know no peers."""
        self.lease_s = 1.0
        """How long a generation worker lets another run of its request be silent."""
        self.clock: Callable[[], float] = time.monotonic
        """Seconds by which the leases of readers run."""

    async def start(self, pool: Pool, name: str, engine: FakeEngine | None = None) -> RunningWorker:
        """Start a worker and wait until it is ready."""
        producer = await self.broker.producer()
        self.metrics[name] = Metrics(pool=pool.value, colour="blue")
        directory = Directory(self.broker)
        counts = PartitionCounts(self.broker)
        outbox = Outbox(
            producer,
            worker_id=name,
            num_token_partitions=NUM_PARTITIONS,
            metrics=self.metrics[name],
            placement=LeastLoad(directory, counts.get, max_length=LIMITS.max_length),
        )
        cancellations = Cancellations(clock=self.clock)
        control = ControlFollower(self.broker, cancellations, check_s=0.005)
        await control.__aenter__()
        handler = self._handler(pool, outbox, engine, cancellations)
        await control.catch_up(5)
        worker = Worker(
            self.broker,
            handler,
            outbox,
            worker_id=name,
            colour="blue",
            limits=self.consumer_limits,
            heartbeat_s=0.05,
            drain_s=5,
            grace_s=self.grace_s,
            directory=directory,
            outliers=self.outliers,
        )
        stop = asyncio.Event()
        task = asyncio.create_task(worker.run(stop), name=name)
        running = self.workers[name] = RunningWorker(worker, task, stop, handler, cancellations, control)
        ready = asyncio.create_task(worker.ready.wait())
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        if task.done():
            task.result()
        return running

    async def start_all(self, engine: FakeEngine | None = None) -> None:
        """Start one worker of each pool."""
        for pool in Pool:
            await self.start(pool, f"{pool}-1", engine)

    async def stop(self, name: str) -> None:
        """Drain a worker and wait until it is gone."""
        running = self.workers.pop(name)
        running.stop.set()
        await running.task
        await running.control.close()

    async def kill(self, name: str) -> None:
        """Crash a worker: it leaves no group, commits nothing and writes nothing more."""
        running = self.workers.pop(name)
        await self.broker.kill(name)
        await running.control.close()
        running.task.cancel()
        await asyncio.gather(running.task, return_exceptions=True)

    async def close(self) -> None:
        """Stop everything."""
        self.broker.down = False
        for name in list(self.workers):
            running = self.workers.pop(name)
            await running.control.close()
            running.task.cancel()
            await asyncio.gather(running.task, return_exceptions=True)

    def client(self, timeout_s: float = 20.0, tenant: str = "default") -> GeaClient:
        """Return a client of this installation."""
        return GeaClient(self.broker, ClientSettings(timeout_s=timeout_s, connect_s=0.3, tenant=tenant))

    def tokens_of(self, request_id: str) -> list[TokenRecord]:
        """Return every record in the token topic that carries the id."""
        records = self.broker.records(TOKENS)
        return [decode_token(record) for record in records if record.key == request_id.encode()]

    def num_held(self, name: str, request_id: str) -> int:
        """Return how many records of a request a worker has begun with; one that waits for another counts too."""
        return len(self.workers[name].cancellations._watched.get((request_id, "default"), ()))

    def sessions(self) -> SessionStore:
        """Return a view of the sessions."""
        return SessionStore(self.store)

    def _handler(self, pool: Pool, outbox: Outbox, engine: FakeEngine | None, cancellations: Cancellations) -> Handler:
        broker: Broker = self.broker
        match pool:
            case Pool.ROUTER:
                mover = RetryMover(
                    broker, outbox, member=outbox.worker_id, commit_interval_ms=20, cancellations=cancellations
                )
                return RouterHandler(
                    broker,
                    outbox,
                    self.sessions(),
                    Directory(broker),
                    limits=self.limits,
                    mover=mover,
                    cancellations=cancellations,
                    room_limits=self.room_limits,
                )
            case Pool.INTENT:
                return AnnotatingHandler(self.intent, outbox, cancellations=cancellations)
            case Pool.RETRIEVAL:
                return AnnotatingHandler(self.retrieval, outbox, cancellations=cancellations)
            case Pool.GENERATION:
                return GenerationHandler(
                    engine or FakeEngine("Within 30 days."),
                    self.planner(),
                    self.sessions(),
                    broker,
                    outbox,
                    topic=pool_topic(Pool.GENERATION, "blue"),
                    limits=GenerationLimits(writer=WriterLimits(max_tokens=4, max_delay_ms=5), lease_s=self.lease_s),
                    cancellations=cancellations,
                    engine_metrics=EngineMetrics(outbox.metrics) if outbox.metrics is not None else None,
                )


@asynccontextmanager
async def installation() -> AsyncIterator[Installation]:
    """An installation with its topics and no workers yet."""
    made = Installation()
    await made.broker.create_topics(topic_specs(NUM_PARTITIONS))
    try:
        yield made
    finally:
        await made.close()
