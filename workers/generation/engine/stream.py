"""The reader's end of a request in the engine's thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from workers.generation.engine.protocol import EngineEvent, Finished


class QueuedStream:
    """An `EngineStream` over a queue. `push` belongs to the event loop's thread; max_tokens bounds the queue."""

    def __init__(self, request_id: str) -> None:
        self._request_id = request_id
        self._events: asyncio.Queue[EngineEvent | Exception] = asyncio.Queue()
        self._is_over = False

    @property
    def request_id(self) -> str:
        """Return the id that the request was submitted under."""
        return self._request_id

    def push(self, event: EngineEvent | Exception) -> None:
        """Hand the next event, or the error that ends the stream, to the reader."""
        self._events.put_nowait(event)

    def __aiter__(self) -> AsyncIterator[EngineEvent]:
        return self

    async def __anext__(self) -> EngineEvent:
        """Return the next event. Safe to cancel: nothing is lost."""
        if self._is_over:
            raise StopAsyncIteration
        event = await self._events.get()
        if isinstance(event, Exception):
            self._is_over = True
            raise event
        self._is_over = isinstance(event, Finished)
        return event
