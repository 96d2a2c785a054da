"""Runs several things until the first of them is done, and ends tasks so that nothing of them is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any


async def end_tasks(*tasks: asyncio.Task[Any] | None) -> None:
    """Cancel tasks and wait until they have ended, whatever they raise; None stands for one that was never begun."""
    begun = [task for task in tasks if task is not None]
    for task in begun:
        task.cancel()
    await asyncio.gather(*begun, return_exceptions=True)


@asynccontextmanager
async def racing(
    *work: Coroutine[Any, Any, Any], beside: Sequence[asyncio.Future[Any]] = (), timeout_s: float | None = None
) -> AsyncIterator[tuple[asyncio.Task[Any], ...]]:
    """Begin all `work` and give its tasks as soon as one of them, or of the futures `beside`, is done, or time is up.

    When the body ends, so have they all: what still runs is cancelled and waited for. What is `beside` goes on.
    """
    tasks = tuple(asyncio.create_task(each) for each in work)
    try:
        await asyncio.wait((*beside, *tasks), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        await end_tasks(*tasks)


async def first_of(*work: Coroutine[Any, Any, Any], beside: Sequence[asyncio.Future[Any]] = ()) -> None:
    """Return when the first is done, and raise what it raised: first what `beside` did, then in the order of `work`."""
    async with racing(*work, beside=beside) as tasks:
        for each in (*beside, *tasks):
            if each.done():
                each.result()
