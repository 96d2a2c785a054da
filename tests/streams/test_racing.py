"""Whoever comes first counts, and nothing of the others is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import pytest

from streams.racing import end_tasks, first_of, racing


class Runner:
    """Work that goes on for ever, and remembers how it ended."""

    def __init__(self) -> None:
        self.is_begun = asyncio.Event()
        self.is_cancelled = False

    async def run(self) -> None:
        self.is_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)  # what it does at its end is waited for
            self.is_cancelled = True


async def after(event: Awaitable[object], result: str) -> str:
    await event
    return result


async def test_the_first_is_done_in_the_body_and_the_others_are_ended_behind_it() -> None:
    runner = Runner()
    async with racing(runner.run(), after(runner.is_begun.wait(), "first")) as (running, done):
        assert (running.done(), done.result()) == (False, "first")
    assert runner.is_cancelled
    assert running.cancelled()


async def test_what_is_beside_ends_the_race_and_goes_on() -> None:
    runner, beside = Runner(), asyncio.get_running_loop().create_future()
    beside.set_result(None)
    await first_of(runner.run(), beside=(beside,))
    waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await first_of(after(asyncio.sleep(0), "done"), beside=(waiting,))
    assert not waiting.done()


async def test_time_that_is_up_ends_the_race_although_nothing_is_done() -> None:
    runner = Runner()
    async with racing(runner.run(), timeout_s=0) as (running,):
        assert not running.done()
    assert running.cancelled()


async def test_what_the_first_raised_is_raised_and_what_is_beside_comes_before_the_work() -> None:
    async def fail(error: Exception) -> None:
        raise error

    runner = Runner()
    with pytest.raises(ZeroDivisionError):
        await first_of(runner.run(), fail(ZeroDivisionError()))
    broken = asyncio.get_running_loop().create_future()
    broken.set_exception(KeyError("beside"))
    with pytest.raises(KeyError, match="beside"):
        await first_of(fail(ZeroDivisionError()), beside=(broken,))


async def test_a_cancelled_race_leaves_nothing_behind() -> None:
    runner = Runner()
    race = asyncio.create_task(first_of(runner.run(), asyncio.Event().wait()))
    await runner.is_begun.wait()
    race.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race
    assert runner.is_cancelled


async def test_tasks_are_ended_whatever_they_raise_and_one_that_was_never_begun_is_passed_over() -> None:
    async def fail_at_the_end() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise ZeroDivisionError

    runner = Runner()
    tasks = [asyncio.create_task(runner.run()), asyncio.create_task(fail_at_the_end())]
    await runner.is_begun.wait()
    await end_tasks(*tasks, None)
    assert all(task.done() for task in tasks)
    await end_tasks(None)
