"""Carries a plan out: its fixed pieces first, then the engine's tokens, as one stream of engine events.

Knows the plan and the engine, no topics. The invariants are those of an engine's stream: one `Finished` at the end, and
usage counts what was handed out. A stream that continues an earlier one is whole again, from its first token.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from schemas.tokens import FinishReason, Usage
from workers.generation.engine.detokenizer import Detokenizer, StopFilter
from workers.generation.engine.protocol import (
    ChoiceEnd,
    Engine,
    EngineEvent,
    EngineRequest,
    Finished,
    TokenChunk,
    Tokenizer,
)
from workers.generation.strategies.gate import SentenceGate
from workers.generation.strategies.plan import FixedPiece, Plan


async def play(
    engine: Engine,
    plan: Plan,
    request_id: str,
    output: Sequence[Sequence[int]] = (),
    *,
    priority: int = 0,
    cache_salt: str = "",
) -> AsyncGenerator[EngineEvent, None]:
    """Yield the chunks of an answer and one `Finished`.

    `output` are the token ids of each choice, by index, that an earlier run of the plan has published: they come again
    as they were, and the rest is drawn. Where they do not begin with the plan's pieces, the choice is made anew.
    `priority` and `cache_salt`: see `EngineRequest`.
    Raises what `Engine.submit` and its stream raise. Whoever stops reading early calls `engine.abort(request_id)`.
    """
    asked = _request(plan, request_id, output, priority, cache_salt) if plan.prompt is not None else None
    if asked is not None and not plan.pieces and plan.may_publish is None:
        async for event in engine.submit(asked):
            yield event
        return
    choices = [_Choice(plan, index) for index in range(plan.sampling.n)]
    fixed = [chunk for choice in choices for chunk in choice.fixed_chunks(engine.tokenizer)]
    stream = None
    if asked is not None and any(choice.end is None for choice in choices):
        stream = engine.submit(asked)  # refused before anything is published
    for chunk in fixed:
        yield chunk
    finished = None
    if stream is not None:
        async for event in stream:
            if isinstance(event, Finished):
                finished = event
                break
            for chunk in choices[event.index].push(event):
                yield chunk
            if all(choice.end is not None for choice in choices):
                engine.abort(request_id)
    for choice in choices:
        for chunk in choice.finish(finished):
            yield chunk
    yield _finished(plan, choices, finished)


class _Choice:
    """One choice: counts what is published, cuts at stop strings, refused sentences and max_tokens."""

    def __init__(self, plan: Plan, index: int) -> None:
        self._plan = plan
        self._index = index
        self._stop = StopFilter(plan.sampling.stop)
        self._gate = SentenceGate(plan.may_publish) if plan.may_publish is not None else None
        self.num_tokens = 0
        self.end: ChoiceEnd | None = None

    def fixed_chunks(self, tokenizer: Tokenizer) -> list[TokenChunk]:
        """Return the pieces as chunks, cut where the answer may not be longer."""
        chunks: list[TokenChunk] = []
        for piece in self._plan.pieces:
            room = self._plan.sampling.max_tokens - self.num_tokens
            if self.end is not None:
                break
            if room <= 0:
                self._cut(FinishReason.LENGTH)
                break
            shown = piece if len(piece.token_ids) <= room else _shortened(piece, room, tokenizer)
            chunks.extend(self._publish(TokenChunk(text=shown.text, token_ids=shown.token_ids, index=self._index)))
            if shown is not piece:
                self._cut(FinishReason.LENGTH)
        if self.end is None and self._plan.prompt is not None and self.num_tokens >= self._plan.sampling.max_tokens:
            self._cut(FinishReason.STOP if self._gate is not None else FinishReason.LENGTH)
        return chunks

    def push(self, chunk: TokenChunk) -> list[TokenChunk]:
        """Take a chunk of the engine and return what may go out."""
        if self.end is not None:
            return []
        released = [chunk] if self._gate is None else self._gate.push(chunk)
        published = [shown for one in released for shown in self._publish(one)]
        if self._gate is not None and self._gate.is_closed and self.end is None:
            self._cut(FinishReason.STOP)
        return published

    def finish(self, finished: Finished | None) -> list[TokenChunk]:
        """Return the rest: the engine is done, or was not needed."""
        if self.end is not None:
            return self._tail()
        reason, stop_reason = FinishReason.STOP, None
        if finished is not None:
            found = next(end for end in finished.choices if end.index == self._index)
            reason, stop_reason = found.finish_reason, found.stop_reason
        published: list[TokenChunk] = []
        if self._gate is not None and reason is not FinishReason.ABORT:
            # What the gate drops is an addition to an answer that is whole already.
            published = [shown for one in self._gate.flush() for shown in self._publish(one)]
            reason = FinishReason.STOP
        if self.end is None:
            self._cut(reason, stop_reason)
        return published + self._tail()

    def _publish(self, chunk: TokenChunk) -> list[TokenChunk]:
        if self.end is not None:
            return []
        text = self._stop.push(chunk.text)
        self.num_tokens += len(chunk.token_ids)
        if self._stop.matched is not None:
            self._cut(FinishReason.STOP, self._stop.matched)
        return [replace(chunk, text=text)]

    def _tail(self) -> list[TokenChunk]:
        """Return what the stop filter held back; its tokens have been counted already."""
        text = self._stop.flush()
        return [TokenChunk(text=text, token_ids=(), index=self._index)] if text else []

    def _cut(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.end = ChoiceEnd(
            index=self._index, finish_reason=reason, num_tokens=self.num_tokens, stop_reason=stop_reason
        )


def _request(
    plan: Plan, request_id: str, output: Sequence[Sequence[int]], priority: int, cache_salt: str
) -> EngineRequest:
    """Ask for what comes after the pieces. Stop strings may span the border: the choices look for them then."""
    assert plan.prompt is not None
    sampling = plan.sampling
    fixed = tuple(token_id for piece in plan.pieces for token_id in piece.token_ids)
    if plan.pieces or plan.may_publish is not None:
        sampling = replace(sampling, stop=(), max_tokens=max(1, sampling.max_tokens - len(fixed)))
    drawn = tuple(_beyond(fixed, tuple(token_ids)) for token_ids in output[: sampling.n])
    return EngineRequest(
        request_id=request_id,
        prompt=plan.prompt,
        sampling=sampling,
        output=drawn,
        priority=priority,
        cache_salt=cache_salt,
    )


def _beyond(fixed: tuple[int, ...], published: tuple[int, ...]) -> tuple[int, ...]:
    """Return the published tokens that the engine has drawn."""
    return published[len(fixed) :] if published[: len(fixed)] == fixed else ()


def _shortened(piece: FixedPiece, num_tokens: int, tokenizer: Tokenizer) -> FixedPiece:
    token_ids = piece.token_ids[:num_tokens]
    detokenizer = Detokenizer()
    text = "".join(detokenizer.push(tokenizer.token_bytes(token_id)) for token_id in token_ids)
    return FixedPiece(text=text, token_ids=token_ids)


def _finished(plan: Plan, choices: list[_Choice], finished: Finished | None) -> Finished:
    drawn = {end.index: end.repetition_ratio for end in finished.choices} if finished else {}
    ends = tuple(
        replace(choice.end, repetition_ratio=drawn.get(choice.end.index, 0.0))
        for choice in choices
        if choice.end is not None
    )
    usage = Usage(
        prompt_tokens=len(plan.prompt or ()),
        completion_tokens=sum(choice.num_tokens for choice in choices),
        cached_tokens=finished.usage.cached_tokens if finished else 0,
    )
    if finished is None:
        return Finished(choices=ends, usage=usage)
    return replace(finished, choices=ends, usage=usage)
