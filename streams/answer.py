"""What an application gets from the client: chunks as they come, or the whole answer.

Knows the events of a stream, not how the request was sent.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from schemas.errors import (
    BrokerUnavailableError,
    RequestFailedError,
    ResponseTimeoutError,
    StreamError,
    StreamExpiredError,
)
from schemas.tokens import End, EndStatus, Failure, TokenLogprob
from streams.racing import end_tasks
from streams.stream_events import Event, StreamEnded, StreamReset, StreamSeen, TextAppended, TextRetracted
from streams.token_reader import StreamReader


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPosition:
    """Where a token stream begins; keep it to replay the answer without a search."""

    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One step of an answer.

    `text` is to be added to choice `index`. `is_reset`: first forget all text of that choice; `retracted`: first take
    these characters off its end. The last chunk has `end` and no text.
    """

    text: str = ""
    index: int = 0
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None
    is_reset: bool = False
    retracted: str = ""
    end: End | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A whole answer. `texts` has all n choices, `text` the first; `end` says how and why it ended."""

    text: str
    end: End
    request_id: str
    position: StreamPosition
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenStream:
    """A reader at the beginning of a stream. `scan_until`: a claim must come before that offset, or has expired."""

    reader: StreamReader
    position: StreamPosition
    scan_until: int | None = None


class ChunkStream:
    """The chunks of one request: `async for chunk in stream`, once. The request is sent when the first is asked for.

    Raises ResponseTimeoutError, StreamGapError, StreamExpiredError, BrokerUnavailableError, InvalidRequestError; a
    request that failed or was cancelled does not raise: the last chunk carries its end.

    `keep_alive` runs from there until the stream is closed or dropped, `cancel` when it is left before its end.
    """

    def __init__(
        self,
        request_id: str,
        open_: Callable[[], Awaitable[OpenStream]],
        timeout_s: float,
        *,
        keep_alive: Callable[[], Coroutine[None, None, None]] | None = None,
        cancel: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.request_id = request_id
        self.position: StreamPosition | None = None
        """Where the stream begins; known once the request is sent."""
        self._open = open_
        self._timeout_s = timeout_s
        self._keep_alive = keep_alive
        self._cancel = cancel
        self._may_run = False
        self._texts: tuple[str, ...] = ()
        self._end: End | None = None
        self._chunks = self._read()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        return await self._chunks.__anext__()

    async def aclose(self) -> None:
        """Stop reading; the request itself goes on, unless it was asked for with `cancel_on_close`. Idempotent."""
        await self._chunks.aclose()
        cancel, self._cancel = self._cancel, None
        if cancel is None or not self._may_run or self._end is not None:
            return
        try:
            await cancel()
        except BrokerUnavailableError as error:  # who leaves cannot do anything about it
            _warn("request not cancelled", request_id=self.request_id, error=error.message)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def answer(self) -> Answer:
        """Read to the end and return the answer. Raises RequestFailedError if the request ended as failed.

        A request that was cancelled has not failed: the answer has the text so far and `end.status` CANCELLED.
        Raises StreamError for a stream that was closed before.
        """
        async for _ in self:
            pass
        end = self._end
        if end is None or self.position is None:
            raise StreamError(f"request {self.request_id}: the stream was closed before its end")
        if end.status is EndStatus.FAILED:
            why = end.failure or Failure(code="internal", message="the request failed")
            raise RequestFailedError(
                f"{why.code}: {why.message}",
                failure_code=why.code,
                field=why.field,
                retry_after_s=why.retry_after_s,
            )
        return Answer(
            text=self._texts[0] if self._texts else "",
            end=end,
            request_id=self.request_id,
            position=self.position,
            texts=self._texts,
        )

    async def _read(self) -> AsyncGenerator[Chunk, None]:
        deadline = time.monotonic() + self._timeout_s
        try:
            opened = await self._open()
        except asyncio.CancelledError:
            self._may_run = True
            raise
        self._may_run = True
        reader, self.position = opened.reader, opened.position
        until = opened.scan_until
        speaking = asyncio.create_task(self._keep_alive(), name="alive") if self._keep_alive is not None else None
        try:
            while not reader.view.is_ended:
                events = await reader.next_events(max(0.0, deadline - time.monotonic()), until=until)
                for event in events:
                    if (chunk := _chunk(event)).end is not None:
                        self._end = chunk.end
                        self._texts = tuple(reader.view.text(index) for index in reader.view.indexes)
                    yield chunk
                if until is not None and reader.next_offset >= until:
                    self._check_start(reader)
                    until = None
                if not events and time.monotonic() >= deadline:
                    raise self._timeout(reader)
        finally:
            await end_tasks(speaking)
            await reader.close()

    def _check_start(self, reader: StreamReader) -> None:
        if reader.view.is_orphaned:
            raise StreamExpiredError(f"request {self.request_id}: the start of its stream has left the topic")

    def _timeout(self, reader: StreamReader) -> ResponseTimeoutError:
        away = reader.last_failure
        why = f"Kafka cannot be reached ({away.message})" if away else "is a worker of every pool running?"
        return ResponseTimeoutError(
            f"request {self.request_id}: no end of the answer within {self._timeout_s:g} s: {why} "
            "The request stays in the log: its answer can be replayed under this request_id",
            request_id=self.request_id,
        )


def _chunk(event: Event) -> Chunk:
    match event:
        case TextAppended():
            return Chunk(index=event.index, text=event.text, token_ids=event.token_ids, logprobs=event.logprobs)
        case TextRetracted():
            return Chunk(index=event.index, retracted=event.text)
        case StreamReset():
            return Chunk(index=event.index, is_reset=True)
        case StreamEnded():
            return Chunk(end=event.end)
        case StreamSeen():
            raise AssertionError("a reader follows it")


def _warn(event: str, **fields: str) -> None:
    import structlog  # here, because it would double the time to import the client

    structlog.get_logger(__name__).warning(event, **fields)
