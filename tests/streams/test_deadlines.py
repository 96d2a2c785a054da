"""Many waits with one timer."""

from __future__ import annotations

import asyncio

import pytest

from streams.deadlines import Deadlines


def soon(seconds: float) -> float:
    return asyncio.get_running_loop().time() + seconds


async def test_a_result_that_comes_in_time_is_returned() -> None:
    future: asyncio.Future[int] = asyncio.Future()
    waiting = asyncio.create_task(Deadlines().await_until(soon(60), future))
    await asyncio.sleep(0)
    future.set_result(7)
    assert await waiting == 7


async def test_each_wait_ends_at_its_own_deadline_in_whatever_order_they_began() -> None:
    deadlines = Deadlines()
    futures: list[asyncio.Future[int]] = [asyncio.Future() for _ in range(4)]
    ended: list[int] = []

    async def await_one(number: int, deadline: float) -> None:
        with pytest.raises(TimeoutError):
            await deadlines.await_until(deadline, futures[number])
        ended.append(number)

    async with asyncio.timeout(10), asyncio.TaskGroup() as group:
        for number, seconds in enumerate((0.06, 0.02, 0.04, -1.0)):
            group.create_task(await_one(number, soon(seconds)))
    assert ended == [3, 1, 2, 0]


async def test_a_wait_that_is_cancelled_cancels_its_future_and_is_forgotten() -> None:
    deadlines = Deadlines()
    future: asyncio.Future[int] = asyncio.Future()
    waiting = asyncio.create_task(deadlines.await_until(soon(60), future))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert future.cancelled()
    assert deadlines.num_waiting == 0


async def test_a_failure_is_raised() -> None:
    future: asyncio.Future[int] = asyncio.Future()
    waiting = asyncio.create_task(Deadlines().await_until(soon(60), future))
    await asyncio.sleep(0)
    future.set_exception(OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        await waiting
