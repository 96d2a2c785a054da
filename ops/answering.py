"""Ask one question, hand its text on as it comes, and measure what a caller sees."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from ops.errors import CommandError
from schemas.request import GenerationRequest
from schemas.tokens import End, EndStatus
from streams.answer import Chunk, ChunkStream
from streams.client import GeaClient

MIN_DECODE_MS = 20.0  # less means that the text came at once, as templates and quotations do
OnChunk = Callable[[Chunk], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer with the times that the caller saw: from the call to the first text and to the end.

    One that was cancelled has the text so far.
    """

    request_id: str
    text: str
    texts: tuple[str, ...]
    end: End
    ttft_ms: float
    total_ms: float

    @property
    def tokens(self) -> int:
        """Tokens of the answer, as the worker counted them."""
        return self.end.usage.completion_tokens

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first by the time they took; all by the whole time if they came at once."""
        decode_ms = self.total_ms - self.ttft_ms
        if self.tokens > 1 and decode_ms >= MIN_DECODE_MS:
            return (self.tokens - 1) / decode_ms * 1000
        return self.tokens / max(self.total_ms, 1) * 1000

    def to_json(self) -> dict[str, Any]:
        """Return what `--json` prints about an answer."""
        return {
            "request_id": self.request_id,
            "answer": self.text,
            "citations": msgspec.to_builtins(self.end.citations),
            "strategy": self.end.strategy,
            "strategy_reason": self.end.strategy_reason,
            "intent": self.end.intent,
            "passages": list(self.end.passage_ids),
            "status": self.end.status.value,
            "finish_reason": self.end.finish_reason.value,
            "ttft_ms": round(self.ttft_ms, 1),
            "total_ms": round(self.total_ms, 1),
            "tokens": self.tokens,
            "tokens_per_s": round(self.tokens_per_s, 1),
            "usage": msgspec.to_builtins(self.end.usage),
            "timings": msgspec.to_builtins(self.end.timings),
            "model": self.end.model,
            **({"answers": list(self.texts)} if len(self.texts) > 1 else {}),
            **({"reason": self.end.failure.message} if self.end.failure else {}),
        }


async def ask(
    client: GeaClient,
    request: GenerationRequest,
    *,
    on_chunk: OnChunk,
    timeout_s: float,
    deadline_s: float | None = None,
    cancel_on_close: bool = False,
) -> Answered:
    """Produce a request and follow it to its end. After `timeout_s` we stop waiting, after `deadline_s` GEA gives up.

    `cancel_on_close`: whoever stops us, or gives up waiting, cancels the request. Raises CommandError for a request
    that failed, GeaError when no end came or Kafka is away.
    """
    stream = client.generate(request, timeout_s=timeout_s, deadline_s=deadline_s, cancel_on_close=cancel_on_close)
    return await follow(stream, on_chunk=on_chunk)


async def follow(stream: ChunkStream, *, on_chunk: OnChunk) -> Answered:
    """Follow a stream to its end; see `ask`."""
    began = time.monotonic()
    first: float | None = None
    texts: dict[int, str] = {}
    end: End | None = None
    async with stream:
        async for chunk in stream:
            if chunk.text and first is None:
                first = time.monotonic()
            _apply(texts, chunk)
            on_chunk(chunk)
            end = chunk.end or end
    done = time.monotonic()
    assert end is not None, "a stream ends with an end or an error"
    if end.status is EndStatus.FAILED:
        raise failure(end, stream.request_id)
    return Answered(
        request_id=stream.request_id,
        text=texts.get(0, ""),
        texts=tuple(texts[index] for index in sorted(texts)),
        end=end,
        ttft_ms=((first or done) - began) * 1000,
        total_ms=(done - began) * 1000,
    )


def failure(end: End, request_id: str) -> CommandError:
    """Return why a request failed, as one line."""
    why = end.failure
    message = f"{why.code}: {why.message}" if why else "the request failed"
    after_s = why.retry_after_s if why else None
    later = f"; come back in {after_s:.0f} s" if after_s else ""
    return CommandError(
        f"request {request_id} failed: {message}{later}",
        code=why.code if why else "internal",
        report={"request_id": request_id, **({"retry_after_s": after_s} if after_s else {})},
    )


def _apply(texts: dict[int, str], chunk: Chunk) -> None:
    if chunk.end is not None:
        return
    before = "" if chunk.is_reset else texts.get(chunk.index, "")
    texts[chunk.index] = before.removesuffix(chunk.retracted) + chunk.text
