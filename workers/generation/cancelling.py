"""Stops what is done for a request in the moment that it is cancelled: any wait, and the engine's work."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from schemas.errors import RequestCancelledError
from workers.generation.engine import Engine

T = TypeVar("T")


async def unless_cancelled(cancelled: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """Do some work; give it up and raise RequestCancelledError as soon as the request is cancelled."""
    return await unless(cancelled, work, RequestCancelledError("cancelled on request"))


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T], error: Exception) -> T:
    """Do some work; give it up and raise `error` as soon as `event` is set."""
    working, hearing = asyncio.create_task(work), asyncio.create_task(event.wait())
    try:
        await asyncio.wait((working, hearing), return_when=asyncio.FIRST_COMPLETED)
        if event.is_set():
            raise error
        return working.result()
    finally:
        for task in (working, hearing):
            task.cancel()
        await asyncio.gather(working, hearing, return_exceptions=True)


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
