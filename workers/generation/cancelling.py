"""Stops what is done for a request in the moment that it is cancelled: any wait, and the engine's work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from schemas.errors import RequestCancelledError
from streams.racing import racing
from workers.generation.engine import Engine

T = TypeVar("T")


async def unless_cancelled(cancelled: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Do some work; give it up and raise RequestCancelledError as soon as the request is cancelled."""
    return await unless(cancelled, work, RequestCancelledError("cancelled on request"))


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T], error: Exception) -> T:
    """Do some work; give it up and raise `error` as soon as `event` is set."""
    async with racing(work, event.wait()) as (working, _):
        if event.is_set():
            raise error
        done: T = working.result()
        return done


@asynccontextmanager
async def aborting(engine: Engine, request_id: str, cancelled: asyncio.Event) -> AsyncIterator[None]:
    """Have the engine abort a request when it is cancelled, and in any case at the end.

    Submit the request before anything else is awaited: an abort that comes first is ignored.
    """

    async def abort_when_cancelled() -> None:
        await cancelled.wait()
        engine.abort(request_id)

    watching = asyncio.create_task(abort_when_cancelled())
    try:
        yield
    finally:
        watching.cancel()
        engine.abort(request_id)
