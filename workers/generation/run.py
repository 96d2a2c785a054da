"""One run of a request: take over → plan → decode → stream → remember → end.

Knows the stream that it writes and the engine, no records and no offsets. A run that finds text of an earlier one goes
on with it where it can draw the same tokens: same weights, same prompt, same plan; otherwise it voids the text and
begins anew. The invariant: what readers have at the end is the answer of one undisturbed run, and is counted once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import msgspec
import structlog

from schemas.envelope import RoutedRequest
from schemas.errors import DeadlineExceededError, GeaError, RequestCancelledError
from schemas.request import Priority
from schemas.tokens import End, EndStatus
from streams.broker import Broker
from streams.cancellations import Cancellations
from streams.clock import now_ms
from streams.session import SessionStore, Turn
from streams.telemetry import Metrics
from streams.token_writer import TokenWriter
from workers.generation.answer import Draft, broken_end, end_of
from workers.generation.beginning import Beginning, draws_alike, remembered
from workers.generation.cancelling import aborting, unless_cancelled
from workers.generation.engine import Engine, EngineEvent, Finished
from workers.generation.engine_metrics import EngineMetrics
from workers.generation.planning import Planner, fingerprint
from workers.generation.replay import Replay
from workers.generation.strategies import Plan, play
from workers.generation.takeover import Found, take_over
from workers.outbox import failure_of
from workers.wanted import check_wanted, seconds_left

PRIORITIES = {Priority.HIGH: -1, Priority.NORMAL: 0, Priority.LOW: 1}
"""The engine runs the lowest first."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """What the runs of one worker share. `num_turns`, `lease_s`: see `GenerationLimits`."""

    engine: Engine
    planner: Planner
    sessions: SessionStore
    broker: Broker
    cancellations: Cancellations
    metrics: Metrics | None
    engine_metrics: EngineMetrics | None
    num_turns: int
    lease_s: float


class Run:
    """Writes the stream of one request through `writer`. `is_takeover`: another run may have begun it."""

    def __init__(
        self,
        parts: Parts,
        writer: TokenWriter,
        routed: RoutedRequest,
        cancelled: asyncio.Event,
        *,
        outranked: asyncio.Event,
        is_takeover: bool,
    ) -> None:
        self.tokens_left = 0
        """Tokens that are not decoded yet, at most: of the prompt, and up to `max_tokens` for each choice."""
        self._parts = parts
        self._writer = writer
        self._routed = routed
        self._cancelled = cancelled
        self._outranked = outranked
        self._is_takeover = is_takeover
        self._found = Found()
        self._draft: Draft | None = None

    @property
    def is_cancelled(self) -> bool:
        """Return whether the request is cancelled."""
        return self._cancelled.is_set()

    async def answer(self) -> None:
        """Bring the request to its end, or wait until another run has.

        Raises what broke it off; the stream has no end then: call `fail`, or hand the request on. OutrankedError: as
        `take_over`.
        """
        if self._is_takeover:
            parts = self._parts
            found = await take_over(
                self._writer,
                parts.broker,
                self._routed,
                self._cancelled,
                outranked=self._outranked,
                lease_s=parts.lease_s,
            )
            if found is None:
                return
            self._found = found
        check_wanted(self._routed, self._parts.cancellations)
        deadline = asyncio.timeout(seconds_left(self._routed))
        try:
            async with deadline:
                draft = await self._produce()
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise DeadlineExceededError("deadline_ms: passed during generation", field="deadline_ms") from error
        await self._finish(draft)

    async def fail(self, error: GeaError) -> None:
        """End the stream for an error, as cancelled if the request is; the text so far stays.

        Raises InvalidRequestError if its place takes no record at all.
        """
        if self.is_cancelled:
            error = self._parts.cancellations.error(self._routed.request_id, self._routed.tenant)
        if isinstance(error, RequestCancelledError):
            text = self._draft.text() if self._draft is not None else self._found.view.text()
            if text:
                await self._remember(text)
        log.info("request_failed", code=error.code, reason=error.message)
        end = broken_end(self._routed, error, now_ms())
        if self._parts.metrics is not None:
            self._parts.metrics.count_end(end.finish_reason)
        await self._writer.end(end)

    async def _produce(self) -> Draft:
        """Continue what is there, else begin anew."""
        if self._found.has_text:
            start = await self._same_start()
            draft = await self._decode(start, self._found) if start is not None else None
            if draft is not None:
                return draft
            log.info("text_voided", num_tokens=self._writer.num_tokens)
            await self._void()
        begun = await self._decode(await self._start(await self._turns()), Found())
        assert begun is not None, "nothing to differ from"
        return begun

    async def _void(self) -> None:
        """Take the text back that an earlier run has begun: from here on it was never there."""
        await self._writer.reset()
        self._found, self._draft = Found(), None

    async def _same_start(self) -> Beginning | None:
        """Return what the visible text was begun with; None if this worker cannot draw its tokens."""
        origin = self._found.view.origin
        if origin is None or not draws_alike(origin, self._parts.engine.identity):
            log.info("text_of_another_model", is_described=origin is not None)
            return None
        start = await self._start(remembered(origin))
        if start.fingerprint != origin.plan and not origin.memory:  # it may have been too much for a record
            start = await self._start(await self._turns())
        return start if start.fingerprint == origin.plan else None

    async def _start(self, turns: Sequence[Turn]) -> Beginning:
        plan, reason = await unless_cancelled(self._cancelled, self._parts.planner.plan(self._routed, turns))
        found = await asyncio.to_thread(fingerprint, plan)
        return Beginning(plan=plan, reason=reason, turns=turns, fingerprint=found)

    async def _decode(self, start: Beginning, found: Found) -> Draft | None:
        """Decode and stream; None if the tokens that readers have do not come again."""
        log.info("strategy", strategy=start.plan.strategy, reason=start.reason, is_continued=found.has_text)
        engine, plan, replay = self._parts.engine, start.plan, Replay(found.view)
        draft = self._draft = Draft(
            routed=self._routed, plan=plan, reason=start.reason, begun=found.view, first_token_ms=found.first_text_ms
        )
        self._writer.describe(start.claim(engine.identity, found.view))
        name = f"{self._writer.owner}-continued" if found.has_text else self._writer.owner
        try:
            playing = aclosing(self._play(plan, name, replay))
            async with aborting(engine, name, self._cancelled), playing as events:
                self.tokens_left = len(plan.prompt or ()) + draft.max_tokens
                await self._stream(events, draft, replay)
        finally:
            self.tokens_left = 0
        is_same = not replay.has_diverged and (replay.is_complete or draft.is_aborted)
        return draft if is_same else None

    def _play(self, plan: Plan, name: str, replay: Replay) -> AsyncGenerator[EngineEvent, None]:
        """Ask the engine as the envelope says: what a client wrote must not share another tenant's cache."""
        routed = self._routed
        priority = PRIORITIES[routed.request.priority]
        return play(self._parts.engine, plan, name, replay.output, priority=priority, cache_salt=routed.tenant)

    async def _stream(self, events: AsyncIterator[EngineEvent], draft: Draft, replay: Replay) -> None:
        """Write what is new of the events; stop where the run differs from what readers have."""
        async for event in events:
            if isinstance(event, Finished):
                draft.finished = event
                continue
            draft.add(event)
            self.tokens_left = max(0, draft.max_tokens - draft.num_tokens)
            new = replay.rest(event)
            if replay.has_diverged:
                return
            if new is not None:
                draft.publish(now_ms())
                await self._writer.append(new.index, new.text, new.token_ids, new.logprobs)

    async def _finish(self, draft: Draft) -> None:
        if draft.text() or not draft.is_aborted:
            await self._remember(draft.text())  # before the end: who has seen it may send the next turn
        # Citing long passages takes a while: off the event loop.
        end = await asyncio.to_thread(end_of, draft, self._parts.engine.identity, now_ms())
        if end.status is EndStatus.CANCELLED:
            error = self._parts.cancellations.error(self._routed.request_id, self._routed.tenant)
            end = msgspec.structs.replace(end, failure=failure_of(error))
        await self._writer.end(end)
        self._measure(draft, end)

    async def _turns(self) -> tuple[Turn, ...]:
        routed, count = self._routed, self._parts.num_turns
        session_id = routed.request.session_id
        if session_id is None or not count:
            return ()
        turns = await self._parts.sessions.last_turns(routed.tenant, session_id, count + 1)
        earlier = [turn for turn in turns if turn.request_id != routed.request_id]  # a run before this one may be there
        return tuple(earlier[-count:])

    async def _remember(self, text: str) -> None:
        """Keep the turn in the session. What was cancelled counts as far as it was shown, or not at all."""
        routed = self._routed
        if routed.request.session_id is None:
            return
        user = routed.request.last_user_text()
        turn = Turn(request_id=routed.request_id, user=user, assistant=text, ended_ms=now_ms())
        await self._parts.sessions.append_turn(routed.tenant, routed.request.session_id, turn)

    def _measure(self, draft: Draft, end: End) -> None:
        metrics, engine_metrics = self._parts.metrics, self._parts.engine_metrics
        if engine_metrics is not None and draft.plan.prompt is not None and draft.finished is not None:
            engine_metrics.note_finished(draft.finished)
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
