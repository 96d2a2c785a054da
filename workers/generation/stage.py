"""The generation pool: plan → decode → stream → remember → end.

Each request runs in a task of its own, on one engine that decodes all of them together. The first thing that a run
writes is its claim; whether the claim counts, the log decides (`streams.claims`). A task that is cancelled (its
partition is lost, or the worker stops) writes nothing more and leaves the record uncommitted: the next owner goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
import structlog

from schemas.envelope import RoutedRequest
from schemas.errors import (
    BrokerUnavailableError,
    DeadlineExceededError,
    DecodeError,
    EngineUnavailableError,
    GeaError,
    InternalError,
    InvalidRequestError,
    StreamError,
)
from schemas.tokens import Claim, End, FinishReason, See
from schemas.worker import Pool
from streams.broker import Broker, TopicPartition
from streams.clock import now_ms
from streams.delivery import Delivery
from streams.session import SessionStore, Turn
from streams.telemetry import bind_request
from streams.token_reader import StreamReader, read_view
from streams.token_writer import TokenWriter, WriterLimits
from workers.generation.answer import Draft, end_of, failed_end
from workers.generation.engine import Engine, TokenChunk
from workers.generation.planning import Planner
from workers.generation.strategies import play
from workers.handler import check_deadline, decode_routed, epoch_of, gather_all, refusal_epoch, refuse_record
from workers.outbox import Outbox
from workers.stage import StageSnapshot

READ_TIMEOUT_S = 30.0

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationLimits:
    """`lease_s`: how long another run of the same request may be silent before this one re-produces it."""

    writer: WriterLimits = field(default_factory=WriterLimits)
    num_turns: int = 3
    lease_s: float = 30.0


@dataclass(slots=True, kw_only=True)
class _Running:
    """A request in work here. `has_ended` tells those who wait whether its stream is over, or they have to run it."""

    routed: RoutedRequest
    has_ended: asyncio.Future[bool] = field(default_factory=lambda: asyncio.get_running_loop().create_future())


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
    ) -> None:
        self._engine = engine
        self._model = ""  # known once it is loaded
        self._planner = planner
        self._sessions = sessions
        self._broker = broker
        self._outbox = outbox
        self._topic = topic
        self._limits = limits
        self._running: dict[str, _Running] = {}

    @property
    def pool(self) -> Pool:
        """Return the generation pool."""
        return Pool.GENERATION

    async def start(self) -> None:
        """Load the engine and warm it with one token."""
        await self._engine.start()
        self._model = self._engine.identity.model
        await self._planner.start(self._engine)

    async def handle(self, batch: Sequence[Delivery]) -> None:
        """Answer a batch, each request in its own task, which ends if its partition is lost."""
        tasks = []
        for delivery in batch:
            task = asyncio.create_task(self._take(delivery))
            delivery.attach(task)
            tasks.append(task)
        try:
            await gather_all(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def snapshot(self) -> StageSnapshot:
        """Return the engine's state."""
        statistics = self._engine.statistics()
        return StageSnapshot(
            model=self._model,
            tokens_in_flight=statistics.tokens_in_flight,
            num_queued=statistics.waiting,
            step_ms=statistics.step_ms,
            last_step_ms=statistics.last_step_ms,
        )

    async def stop(self) -> None:
        """Stop the engine."""
        await self._engine.stop()

    async def _take(self, delivery: Delivery) -> None:
        try:
            routed = decode_routed(delivery.record)
        except (DecodeError, InvalidRequestError) as error:
            await refuse_record(self._outbox, delivery, error)
            return
        with bind_request(routed.request_id, traceparent=routed.traceparent):
            await self._answer(delivery, routed)

    async def _answer(self, delivery: Delivery, routed: RoutedRequest) -> None:
        """Bring one request to its end and acknowledge it, or leave its record to the next owner by raising."""
        while (running := self._running.get(routed.request_id)) is not None:
            if await asyncio.shield(running.has_ended):
                await self._share(delivery, routed, running.routed)
                return
        running = self._running[routed.request_id] = _Running(routed=routed)
        failure: BrokerUnavailableError | None = None
        is_over = False
        try:
            await self._run(delivery, routed)
            is_over = True
        except BrokerUnavailableError as error:
            failure = error
        finally:  # also before the request is handed on: it may come back here before that is acknowledged
            del self._running[routed.request_id]
            running.has_ended.set_result(is_over)
        if failure is not None:
            await self._reproduce(routed, failure)
        delivery.done()

    async def _share(self, delivery: Delivery, routed: RoutedRequest, first: RoutedRequest) -> None:
        """Acknowledge a copy of a request that has ended here; a repeat is pointed to the first one's stream."""
        if routed.tenant != first.tenant:
            in_use = InvalidRequestError("request_id: in use by another tenant", field="request_id")
            await self._outbox.dead_letter(delivery.record, in_use)
        elif routed.origin != first.origin:
            see = See(topic=first.reply.topic, partition=first.reply.partition, offset=first.reply.start)
            await self._outbox.point_to(routed.reply, routed.request_id, see, epoch=refusal_epoch(delivery))
        delivery.done()

    async def _run(self, delivery: Delivery, routed: RoutedRequest) -> None:
        """Write the stream of one run. Raises BrokerUnavailableError and EngineUnavailableError; the rest ends it."""
        async with self._writer(delivery, routed) as writer:
            try:
                if (delivery.is_takeover or routed.hop > 0) and not await self._take_over(writer, routed):
                    return
                check_deadline(routed)
                async with asyncio.timeout((routed.deadline_ms - now_ms()) / 1000):
                    await self._generate(writer, routed)
            except (BrokerUnavailableError, EngineUnavailableError):
                raise
            except TimeoutError:
                late = DeadlineExceededError("deadline_ms: passed during generation", field="deadline_ms")
                await self._fail(writer, delivery, routed, late)
            except GeaError as error:
                await self._fail(writer, delivery, routed, error)
            except Exception as error:
                log.exception("generation_failed")
                fault = InternalError(f"{type(error).__name__}: {error}")
                await self._outbox.dead_letter(delivery.record, fault)
                await self._fail(writer, delivery, routed, fault)

    async def _fail(self, writer: TokenWriter, delivery: Delivery, routed: RoutedRequest, error: GeaError) -> None:
        """End a run as failed, in its own name: another's claim of the same epoch would not count."""
        log.info("request_failed", code=error.code, reason=error.message)
        if self._outbox.metrics is not None:
            self._outbox.metrics.count_end(FinishReason.ERROR)
        try:
            await writer.end(failed_end(routed, error, now_ms()))
        except InvalidRequestError as refusal:  # its place takes no record at all: nobody can be told
            await self._outbox.dead_letter(delivery.record, refusal)

    def _writer(self, delivery: Delivery, routed: RoutedRequest) -> TokenWriter:
        identity = self._engine.identity
        return TokenWriter(
            self._outbox.producer,
            routed.reply,
            routed.request_id,
            epoch=epoch_of(delivery, routed.hop),
            claim=Claim(model=identity.weights_hash, tokenizer=identity.tokenizer_hash, precision=identity.precision),
            limits=self._limits.writer,
        )

    async def _take_over(self, writer: TokenWriter, routed: RoutedRequest) -> bool:
        """Claim a request that an earlier owner may have begun; False if there is nothing left to do.

        Text of an earlier owner is voided: the new run starts from its first token.
        """
        offset = await writer.claim()
        try:
            view = await read_view(
                self._broker, routed.reply, routed.request_id, until=offset + 1, timeout_s=READ_TIMEOUT_S
            )
        except StreamError as error:
            log.warning("stream_unreadable", code=error.code, reason=error.message)
            await writer.reset()
            return True
        if view.is_ended:
            return False
        if not view.is_owned_by(writer.epoch, writer.owner):
            await self._await_winner(routed)
            return False
        if view.indexes:
            log.info("take_over", num_tokens_voided=sum(view.next_seq(index) for index in view.indexes))
            await writer.reset()
        return True

    async def _generate(self, writer: TokenWriter, routed: RoutedRequest) -> None:
        plan, reason = await self._planner.plan(routed, await self._turns(routed))
        log.info("strategy", strategy=plan.strategy, reason=reason)
        draft = Draft(routed=routed, plan=plan, reason=reason)
        try:
            async for event in play(self._engine, plan, writer.owner):
                if isinstance(event, TokenChunk):
                    draft.add(event, now_ms())
                    await writer.append(event.index, event.text, event.token_ids, event.logprobs)
                else:
                    draft.finished = event
        finally:
            self._engine.abort(writer.owner)
        await self._remember(draft)  # before the end: who has seen it may send the next turn
        # Citing long passages takes a while: off the event loop.
        end = await asyncio.to_thread(end_of, draft, self._engine.identity, now_ms())
        await writer.end(end)
        self._measure(draft, end)

    def _measure(self, draft: Draft, end: End) -> None:
        metrics = self._outbox.metrics
        if metrics is None:
            return
        metrics.count_end(end.finish_reason)
        metrics.prompt_tokens.inc(end.usage.prompt_tokens)
        metrics.request_prompt_tokens.observe(end.usage.prompt_tokens)
        metrics.generation_tokens.inc(end.usage.completion_tokens)
        metrics.time_to_first_token.observe(end.timings.ttft_ms / 1000)
        metrics.e2e_request_latency.observe(end.timings.total_ms / 1000)
        for gap_ms in draft.gaps_ms:
            metrics.inter_token_latency.observe(gap_ms / 1000)

    async def _turns(self, routed: RoutedRequest) -> tuple[Turn, ...]:
        session_id = routed.request.session_id
        if session_id is None:
            return ()
        turns = await self._sessions.last_turns(routed.tenant, session_id, self._limits.num_turns + 1)
        earlier = [turn for turn in turns if turn.request_id != routed.request_id]  # a run before this one may be there
        return tuple(earlier[-self._limits.num_turns :]) if self._limits.num_turns else ()

    async def _remember(self, draft: Draft) -> None:
        routed = draft.routed
        if routed.request.session_id is None:
            return
        turn = Turn(
            request_id=routed.request_id,
            user=routed.request.last_user_text(),
            assistant=draft.text(),
            ended_ms=now_ms(),
        )
        await self._sessions.append_turn(routed.tenant, routed.request.session_id, turn)

    async def _await_winner(self, routed: RoutedRequest) -> None:
        """Wait for the end of another run whose claim counts instead of ours.

        Raises BrokerUnavailableError if it makes no progress for a lease: the request is then re-produced.
        """
        place = TopicPartition(routed.reply.topic, routed.reply.partition)
        reader = StreamReader(self._broker, routed.request_id, place, routed.reply.start)
        try:
            while not reader.view.is_ended:
                if not await reader.next_events(self._limits.lease_s):
                    raise BrokerUnavailableError(f"another run has been silent for {self._limits.lease_s:g} s")
        finally:
            await reader.close()

    async def _reproduce(self, routed: RoutedRequest, error: GeaError) -> None:
        """Hand the request on as a new record with a higher hop: its next run outranks what this one wrote."""
        log.warning("request_reproduced", code=error.code, reason=error.message, hop=routed.hop + 1)
        await self._outbox.forward(msgspec.structs.replace(routed, hop=routed.hop + 1), self._topic)
