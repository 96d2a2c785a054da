"""The generation pool as its worker sees it: records in, each answered, handed on, or left to the next owner.

Each request runs in a task of its own (`workers.generation.run`), on one engine that decodes all of them together.
A task that is cancelled (its partition is lost, or the worker stops) writes nothing more and leaves the record
uncommitted: the next owner goes on. What becomes of a request that fails, `workers.failure_policy` says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.errors import (
    BrokerUnavailableError,
    DecodeError,
    EngineUnavailableError,
    GeaError,
    InternalError,
    InvalidRequestError,
)
from schemas.tokens import Epoch, See
from schemas.worker import Pool
from streams.broker import Broker
from streams.cancellations import Cancellations
from streams.delivery import Delivery
from streams.expiring import ExpiringMap
from streams.session import SessionStore
from streams.telemetry import bind_request
from streams.token_writer import TokenWriter, WriterLimits
from workers.failure_policy import MAX_ATTEMPTS
from workers.generation.beginning import claim_of
from workers.generation.engine import Engine
from workers.generation.engine_metrics import EngineMetrics
from workers.generation.planning import Planner
from workers.generation.probe import probe_engine
from workers.generation.run import Parts, Run
from workers.generation.settling import HandOn, hand_on, settle
from workers.generation.takeover import OutrankedError
from workers.handler import decode_routed, epoch_of, handle_each, refusal_epoch, refuse_id_in_use, refuse_record
from workers.outbox import Outbox
from workers.stage import StageSnapshot

LEASE_POLL_S = 0.05
MAX_KNOWN = 10_000  # requests that have run here, for copies that come late
KNOWN_S = 600.0
MAX_FAILURE_CHARS = 300  # of the engine's, in the worker's status

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """`lease_s`: how long another run of the same request may be silent before this one re-produces it.

    `num_turns`: how many turns of a session a prompt holds. `max_attempts`: how often a request is retried.
    """

    writer: WriterLimits = field(default_factory=WriterLimits)
    num_turns: int = 3
    lease_s: float = 30.0
    max_attempts: int = MAX_ATTEMPTS


@dataclass(frozen=True, slots=True, kw_only=True)
class _Known:
    """Whose request has run here, where its stream stands, and whether that has ended."""

    tenant: str
    origin: Origin
    reply: Reply
    has_ended: bool


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request in work here; who waits for it hears of `is_over`.

    `outranked` is set when a record of it waits here whose run will have a higher epoch.
    """

    routed: RoutedRequest
    epoch: Epoch
    run: Run | None = None
    outranked: asyncio.Event = field(default_factory=asyncio.Event)
    is_over: asyncio.Event = field(default_factory=asyncio.Event)


class GenerationHandler:
    """Answers requests; the `Handler` of the generation pool."""

    def __init__(
        self,
        engine: Engine,
        planner: Planner,
        sessions: SessionStore,
        broker: Broker,
        outbox: Outbox,
        *,
        topic: str,
        limits: GenerationLimits = GenerationLimits(),
        cancellations: Cancellations | None = None,
        engine_metrics: EngineMetrics | None = None,
    ) -> None:
        self._engine = engine
        self._model = ""  # known once it is loaded
        self._outbox = outbox
        self._topic = topic
        self._limits = limits
        self._parts = Parts(
            engine=engine,
            planner=planner,
            sessions=sessions,
            broker=broker,
            cancellations=cancellations or Cancellations(),
            metrics=outbox.metrics,
            engine_metrics=engine_metrics,
            num_turns=limits.num_turns,
            lease_s=limits.lease_s,
        )
        self._running: dict[str, _Running] = {}
        self._known: ExpiringMap[str, _Known | None] = ExpiringMap(max_age_s=KNOWN_S, max_items=MAX_KNOWN)

    @property
    def pool(self) -> Pool:
        """Return the generation pool."""
        return Pool.GENERATION

    async def start(self) -> None:
        """Load the engine and warm it with one token."""
        await self._engine.start()
        if self._parts.engine_metrics is not None:
            self._parts.engine_metrics.watch(self._engine.statistics)
        self._model = self._engine.identity.model
        await self._parts.planner.start(self._engine)

    async def handle(self, batch: Sequence[Delivery]) -> None:
        """Answer a batch, each request in its own task, which ends if its partition is lost."""
        await handle_each((delivery, self._take(delivery)) for delivery in batch)

    def snapshot(self) -> StageSnapshot:
        """Return the engine's state."""
        statistics = self._engine.statistics()
        return StageSnapshot(
            model=self._model,
            tokens_in_flight=statistics.tokens_in_flight,
            tokens_queued=sum(running.run.tokens_left for running in self._running.values() if running.run),
            num_queued=statistics.waiting,
            step_ms=statistics.step_ms,
            last_step_ms=statistics.last_step_ms,
            kv_usage=statistics.kv_usage,
            owes_step=statistics.running + statistics.waiting > 0,
            failure=statistics.failure[:MAX_FAILURE_CHARS],
        )

    async def probe(self) -> float | None:
        """Decode a few tokens and return the time of one."""
        return await probe_engine(self._engine)

    async def stop(self) -> None:
        """Stop the engine."""
        await self._engine.stop()

    async def _take(self, delivery: Delivery) -> None:
        try:
            routed = decode_routed(delivery.record)
        except (DecodeError, InvalidRequestError) as error:
            await refuse_record(self._outbox, delivery, error)
            return
        lease_s = routed.request.reader_lease_s
        with (
            bind_request(routed.request_id, traceparent=routed.traceparent),
            self._parts.cancellations.watch(routed.request_id, routed.tenant, lease_s=lease_s) as cancelled,
        ):
            await self._answer(delivery, routed, cancelled)

    async def _answer(self, delivery: Delivery, routed: RoutedRequest, cancelled: asyncio.Event) -> None:
        """Bring one request to its end and acknowledge it, or leave its record to the next owner by raising."""
        is_takeover, epoch = delivery.is_takeover or routed.hop > 0, epoch_of(delivery, routed.hop)
        known = await self._until_free(routed, epoch)
        if known is not None:
            is_takeover = True  # its end may have been written in vain: only the log tells
        if known is not None and known.has_ended:
            if routed.tenant != known.tenant:
                await refuse_id_in_use(self._outbox, delivery, routed.request_id, routed.reply, known.reply)
                delivery.done()
                return
            received, routed = routed, await self._joined(delivery, routed, known)
            await self._until_free(received, epoch)  # a repeat is run as the first one, but takes nobody's place
        running = self._running[routed.request_id] = _Running(routed=routed, epoch=epoch)
        is_over = False
        try:
            to = await self._run(delivery, running, cancelled, is_takeover=is_takeover)
            is_over = to is None
        except OutrankedError:
            to = None  # the record that waits here is the one to finish
        finally:  # also before the request is handed on: it may come back here before that is acknowledged
            del self._running[routed.request_id]
            known = _Known(tenant=routed.tenant, origin=routed.origin, reply=routed.reply, has_ended=is_over)
            self._known.put(routed.request_id, known)
            running.is_over.set()
        if to is not None:
            await hand_on(self._outbox, delivery, routed, to, self._topic)
        delivery.done()

    async def _until_free(self, routed: RoutedRequest, epoch: Epoch) -> _Known | None:
        """Wait while the request is run here; return what is known of a run that was here not long ago."""
        while (running := self._running.get(routed.request_id)) is not None:
            if epoch > running.epoch and _is_same(routed, running.routed):
                running.outranked.set()
            await running.is_over.wait()
        return self._known.get(routed.request_id, None)

    async def _joined(self, delivery: Delivery, routed: RoutedRequest, first: _Known) -> RoutedRequest:
        """Return a copy of a request that has run here as one of the same stream; a repeat is pointed to that."""
        if routed.origin == first.origin:
            return routed
        see = See(topic=first.reply.topic, partition=first.reply.partition, offset=first.reply.start)
        await self._outbox.point_to(routed.reply, routed.request_id, see, epoch=refusal_epoch(delivery))
        return msgspec.structs.replace(routed, reply=first.reply, origin=first.origin)

    async def _run(
        self, delivery: Delivery, running: _Running, cancelled: asyncio.Event, *, is_takeover: bool
    ) -> HandOn | None:
        """Write the stream of one run; return how the request goes on if that has no end.

        Raises EngineUnavailableError: the record is left to the next owner.
        """
        routed = running.routed
        await _await_lease(delivery)
        async with self._writer(delivery, routed) as writer:
            run = running.run = Run(
                self._parts, writer, routed, cancelled, outranked=running.outranked, is_takeover=is_takeover
            )
            try:
                await run.answer()
            except BrokerUnavailableError as error:
                return HandOn(error=error)
            except (EngineUnavailableError, OutrankedError):
                raise
            except Exception as error:
                fault = error if isinstance(error, GeaError) else InternalError(f"{type(error).__name__}: {error}")
                if fault is not error:
                    log.exception("generation_failed")
                return await settle(self._outbox, delivery, run, routed, fault, max_attempts=self._limits.max_attempts)
        return None

    def _writer(self, delivery: Delivery, routed: RoutedRequest) -> TokenWriter:
        return TokenWriter(
            self._outbox.producer,
            routed.reply,
            routed.request_id,
            epoch=epoch_of(delivery, routed.hop),
            claim=claim_of(self._engine.identity),
            limits=self._limits.writer,
        )


def _is_same(routed: RoutedRequest, other: RoutedRequest) -> bool:
    """Return whether two records are of one request: forwarded twice or handed on, and no repeat by a client."""
    return (routed.tenant, routed.origin, routed.reply) == (other.tenant, other.origin, other.reply)


async def _await_lease(delivery: Delivery) -> None:
    """Wait until the partition is surely ours: a member that the group has not heard of lately may have lost it.

    Our task is cancelled if it is lost.
    """
    while not delivery.is_leased():  # noqa: ASYNC110 - it depends on the time since the last heartbeat
        await asyncio.sleep(LEASE_POLL_S)
