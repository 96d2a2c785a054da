"""A request that fails for a cause that may pass comes again and goes on with its text; else it ends, once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schemas.codec import unpack
from schemas.envelope import RoutedRequest
from schemas.tokens import End, EndStatus, Kind
from schemas.worker import Pool
from streams.answer import Answer
from streams.broker import Record
from streams.client import GeaClient
from streams.retry import without_order
from streams.topics import RETRY_SHORT
from tests.flow.continued import (
    GENERATION,
    NUM_TOKENS,
    SCRIPT,
    SHORT,
    TEXT,
    Heard,
    ask,
    check_once,
    check_whole,
    halted,
    published,
    start_path,
)
from tests.flow.harness import Installation, installation
from tests.flow.holds import Gate
from tests.flow.records import all_committed, dead_letters, send_again
from tests.streams.token_fakes import until
from workers.generation.engine.fake import FakeEngine


class Failing:
    """A pace for the scripted engine: at each of the given tokens it fails, once."""

    def __init__(self, *at: int) -> None:
        self._at = list(at)
        self._num_tokens = 0

    async def __call__(self) -> None:
        await asyncio.sleep(0)
        self._num_tokens += 1
        if self._at and self._num_tokens > self._at[0]:
            self._num_tokens = self._at.pop(0)
            raise RuntimeError("the device has had a fault")


async def put_aside(gea: Installation, count: int = 1) -> Record:
    """Wait until so many retries stand in their topic, and return the last."""
    async with asyncio.timeout(5):
        await gea.broker.until(lambda: len(gea.broker.records(RETRY_SHORT)) == count)
    return max(gea.broker.records(RETRY_SHORT), key=lambda record: unpack(record.value, RoutedRequest).attempt)


async def bring_back(gea: Installation, record: Record) -> None:
    """Do what the mover does when a retry is due, without the wait."""
    producer = await gea.broker.producer()
    headers = without_order(record.headers)
    await producer.send(GENERATION, record.value, key=record.key, headers=headers)


@pytest.mark.parametrize("num_tokens", [0, 1, 7, 14])
async def test_a_request_that_the_engine_dropped_goes_on_with_its_text(num_tokens: int) -> None:
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=Failing(num_tokens)))
        asking = asyncio.create_task(ask(client, **SHORT))
        record = await put_aside(gea)
        again = unpack(record.value, RoutedRequest)
        assert (again.attempt, again.hop) == (1, 1)
        assert not any(token.kind is Kind.END for token in gea.tokens_of("r-1"))
        await all_committed(gea, GENERATION, Pool.GENERATION)
        await bring_back(gea, record)
        heard = await asking
        check_whole(heard)
        check_once(gea, {0: NUM_TOKENS})
        assert dead_letters(gea) == []


async def test_a_request_that_fails_every_time_is_put_aside_and_ends_with_the_text_that_is_out() -> None:
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=Failing(7, 9, 11)))
        asking = asyncio.create_task(ask(client, **SHORT))
        for count in (1, 2):
            await bring_back(gea, await put_aside(gea, count))
        heard = await failed(asking)
        assert heard.end is not None
        assert heard.end.failure is not None
        assert (heard.end.status, heard.end.failure.code) == (EndStatus.FAILED, "internal")
        records = gea.tokens_of("r-1")
        assert [record.kind for record in records].count(Kind.END) == 1
        assert heard.end.usage.completion_tokens == sum(len(record.token_ids) for record in records) > 0
        assert heard.num_resets == 0
        assert TEXT.startswith(heard.texts[0])
        (letter,) = dead_letters(gea)
        assert letter.code == "internal"
        await all_committed(gea, GENERATION, Pool.GENERATION)


async def failed(asking: asyncio.Task[Heard]) -> Heard:
    """Return what a reader heard of a request that fails: its stream does not raise, it ends."""
    async with asyncio.timeout(5):
        return await asking


async def full(gea: Installation, client: GeaClient, gate: Gate) -> asyncio.Task[Answer]:
    """Let a first request, `r-0`, take the engine's only place; none may wait for it."""
    await start_path(gea, FakeEngine(SCRIPT, pause=gate, max_sequences=1, max_waiting=0))
    first = asyncio.create_task(client.complete("tell me", request_id="r-0", **SHORT))
    await gate.reached.wait()
    return first


async def test_a_request_that_finds_the_engines_queue_full_comes_again_and_leaves_no_trace_until_then() -> None:
    gate = Gate(stop_at=5)
    async with installation() as gea, gea.client() as client:
        first = await full(gea, client, gate)
        asking = asyncio.create_task(ask(client, **SHORT))
        record = await put_aside(gea)
        assert gea.tokens_of("r-1") == []
        gate.opened.set()
        assert (await first).text == TEXT
        await bring_back(gea, record)
        heard = await asking
        check_whole(heard)


async def test_a_retry_that_would_come_too_late_is_answered_now() -> None:
    gate = Gate(stop_at=5)
    async with installation() as gea, gea.client() as client:
        first = await full(gea, client, gate)
        heard = await failed(asyncio.create_task(ask(client, deadline_s=2, **SHORT)))
        gate.opened.set()
        await first
        end = end_of_failure(heard)
        assert end.failure is not None
        assert (end.failure.code, (end.failure.retry_after_s or 0) > 0) == ("overloaded", True)


def end_of_failure(heard: Heard) -> End:
    assert heard.end is not None
    assert heard.end.status is EndStatus.FAILED
    return heard.end


async def test_a_request_that_is_cancelled_and_fails_ends_as_cancelled_at_once() -> None:
    gate = Gate(stop_at=7)

    async def fails() -> None:
        await gate()
        if gate.passed.is_set():
            raise RuntimeError("the device has had a fault")

    class Deaf(FakeEngine):
        def abort(self, request_id: str) -> None:
            gate.opened.set()

    async with installation() as gea, gea.client() as client:
        await start_path(gea, Deaf(SCRIPT, pause=fails))
        asking = asyncio.create_task(ask(client, **SHORT))
        await gate.reached.wait()
        gea.workers["generation-1"].cancellations.cancel("r-1", "default")
        heard = await asking
        assert heard.end is not None
        assert (heard.end.status, heard.end.usage.completion_tokens) == (EndStatus.CANCELLED, 7)
        assert gea.broker.records(RETRY_SHORT) == []
        assert dead_letters(gea) == []


async def test_a_retry_of_a_request_that_was_cancelled_meanwhile_ends_with_its_text() -> None:
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=Failing(7)))
        asking = asyncio.create_task(ask(client, **SHORT))
        record = await put_aside(gea)
        num_tokens = sum(len(token.token_ids) for token in gea.tokens_of("r-1"))
        gea.workers["generation-1"].cancellations.cancel("r-1", "default")
        await bring_back(gea, record)
        heard = await asking
        assert heard.end is not None
        assert (heard.end.status, heard.end.usage.completion_tokens) == (EndStatus.CANCELLED, num_tokens)
        assert heard.num_resets == 0


async def test_a_copy_that_waits_for_a_run_that_is_retried_takes_over_and_answers() -> None:
    gate = Gate(stop_at=7)
    calls = 0

    async def fails_once() -> None:
        nonlocal calls
        await gate()
        calls += gate.passed.is_set()
        if calls == 1:
            raise RuntimeError("the device has had a fault")

    async with installation() as gea, gea.client() as client:
        gea.lease_s = 0.05
        await start_path(gea, FakeEngine(SCRIPT, pause=fails_once))
        asking = asyncio.create_task(ask(client, **SHORT))
        await gate.reached.wait()
        await send_again(gea, GENERATION)
        await until(lambda: gea.num_held("generation-1", "r-1") == 2)
        gate.opened.set()
        heard = await asking
        assert (heard.texts[0], heard.num_resets) == (TEXT, 0)
        await all_committed(gea, GENERATION, Pool.GENERATION)


async def test_a_broker_that_was_away_in_mid_stream_costs_no_text() -> None:
    gate = Gate(stop_at=9)
    async with installation() as gea, gea.client() as client:
        asking = await halted(gea, client, gate)
        await published(gea, 9)
        gea.broker.down = True
        gate.opened.set()
        await until(lambda: not gea.workers["generation-1"].handler._running)  # type: ignore[attr-defined]
        gea.broker.down = False
        heard = await asking
        check_whole(heard)
        check_once(gea, {0: NUM_TOKENS})


async def test_a_conversation_that_the_models_template_refuses_is_answered_not_retried() -> None:
    from tests.flow import planners

    refusing = "{% if messages[-1].content %}{{ raise_exception('no such roles') }}{% endif %}"
    fields: dict[str, Any] = SHORT
    async with installation() as gea, gea.client() as client:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(planners, "TEMPLATE", refusing)
            await start_path(gea, FakeEngine(SCRIPT))
        heard = await failed(asyncio.create_task(ask(client, **fields)))
        end = end_of_failure(heard)
        assert end.failure is not None
        assert (end.failure.code, end.failure.field) == ("invalid_request", "messages")
        assert gea.broker.records(RETRY_SHORT) == []
        assert not gea.workers["generation-1"].task.done()
