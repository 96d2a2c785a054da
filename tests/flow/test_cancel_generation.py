"""A cancelled request stops within one step of the engine, wherever it is, and ends once, with the text that is out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from schemas.tokens import End, EndStatus, Kind
from schemas.worker import Pool
from streams.client import GeaClient
from tests.flow.cancelled import cancel, check_cancelled, text_of
from tests.flow.continued import GENERATION, NUM_TOKENS, SCRIPT, SHORT, TEXT, ask, halted, published, start_path
from tests.flow.harness import Installation, installation
from tests.flow.holds import Gate
from tests.flow.planners import held_planner
from tests.flow.records import all_committed, send_again, view_of
from tests.streams.token_fakes import until
from workers.generation.engine.fake import FakeEngine


@pytest.mark.parametrize("num_tokens", [0, 1, 3, 7, 14, 26, NUM_TOKENS - 1])
async def test_a_cancel_between_two_tokens_keeps_what_is_decoded_and_stops_the_engine(num_tokens: int) -> None:
    gate = Gate(stop_at=num_tokens)
    engine = FakeEngine(SCRIPT, pause=gate)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine)
        asking = asyncio.create_task(ask(client, **SHORT))
        await gate.reached.wait()  # tokens that are still to be written are counted too
        cancel(gea)
        heard = await asking
        await check_cancelled(gea, heard.end)
        assert heard.end is not None
        assert heard.end.failure is not None
        assert heard.end.failure.message == "no longer wanted"
        assert heard.end.usage.completion_tokens == num_tokens
        assert (heard.texts[0], heard.num_resets) == (text_of(num_tokens), 0)
        assert (engine.statistics().running, engine.statistics().waiting) == (0, 0)
        assert not gate.passed.is_set()


async def test_all_choices_are_cancelled_together() -> None:
    async with installation() as gea, gea.client() as client:
        asking = await halted(gea, client, Gate(stop_at=9), n=2)
        cancel(gea)
        heard = await asking
        await check_cancelled(gea, heard.end)
        assert heard.texts == {0: text_of(9), 1: text_of(9)}


async def test_a_client_cancels_and_every_worker_hears_it() -> None:
    async with installation() as gea, gea.client() as client:
        asking = await halted(gea, client, Gate(stop_at=9))
        await client.cancel("r-1")
        await check_cancelled(gea, (await asking).end)


async def test_what_was_cancelled_before_it_came_costs_no_generation() -> None:
    engine = FakeEngine(SCRIPT)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine)
        cancel(gea)
        heard = await ask(client, session_id="s", **SHORT)
        await check_cancelled(gea, heard.end)
        assert not engine.requests
        assert await gea.sessions().last_turns("default", "s", 1) == ()


async def test_a_cancel_while_the_prompt_is_made_ends_the_request_before_the_engine_hears_of_it() -> None:
    planner, engine = held_planner(num_free=0), FakeEngine(SCRIPT)
    async with installation() as gea, gea.client() as client:
        gea.planner = lambda: planner
        await start_path(gea, engine)
        asking = asyncio.create_task(ask(client, **SHORT))
        await planner.held.wait()
        cancel(gea)
        await check_cancelled(gea, (await asking).end)
        assert not engine.requests


async def test_a_cancel_before_the_engine_has_admitted_the_request_ends_it_and_disturbs_no_neighbour() -> None:
    gate = Gate(stop_at=5)
    engine = FakeEngine(SCRIPT, pause=gate, max_sequences=1)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine)
        neighbour = asyncio.create_task(client.complete("tell me", request_id="r-0", **SHORT))
        await gate.reached.wait()
        asking = asyncio.create_task(ask(client, **SHORT))
        await until(lambda: engine.statistics().waiting == 1)
        cancel(gea)
        heard = await asking
        assert engine.statistics().waiting == 0
        gate.opened.set()
        assert (await neighbour).text == TEXT
        await check_cancelled(gea, heard.end)


async def test_a_cancel_by_another_tenant_changes_nothing() -> None:
    gate = Gate(stop_at=9)
    async with installation() as gea, gea.client() as client:
        asking = await halted(gea, client, gate)
        cancel(gea, tenant="other")
        gate.opened.set()
        assert (await asking).texts[0] == TEXT


async def test_a_cancel_after_the_end_changes_nothing() -> None:
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT))
        heard = await ask(client, **SHORT)
        cancel(gea)
        await all_committed(gea, GENERATION, Pool.GENERATION)
        assert heard.end == view_of(gea, "r-1").end
        assert [record.kind for record in gea.tokens_of("r-1")].count(Kind.END) == 1


async def test_the_next_turn_knows_the_part_of_a_cancelled_answer_that_was_shown() -> None:
    gate = Gate(stop_at=9)
    engine = FakeEngine(SCRIPT, pause=gate)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine)
        asking = asyncio.create_task(ask(client, session_id="s", **SHORT))
        await gate.reached.wait()
        cancel(gea)
        await check_cancelled(gea, (await asking).end)
        gate.opened.set()
        await client.complete("go on", request_id="r-2", session_id="s", **SHORT)
        assert text_of(9).encode() in bytes(token for token in engine.requests[-1].prompt if token < 256)


async def test_a_copy_that_waits_for_the_run_of_a_cancelled_request_ends_with_it() -> None:
    async with installation() as gea, gea.client() as client:
        asking = await halted(gea, client, Gate(stop_at=9))
        await send_again(gea, GENERATION)
        await until(lambda: gea.num_held("generation-1", "r-1") == 2)
        cancel(gea)
        await check_cancelled(gea, (await asking).end)


async def test_a_request_cancelled_while_the_broker_is_away_ends_when_it_is_back() -> None:
    async with installation() as gea, gea.client() as client:
        asking = await halted(gea, client, Gate(stop_at=9))
        await published(gea, 9)
        gea.broker.down = True
        cancel(gea)
        await until(lambda: not gea.workers["generation-1"].handler._running)  # type: ignore[attr-defined]
        gea.broker.down = False
        heard = await asking
        await check_cancelled(gea, heard.end)
        assert (heard.texts[0], heard.num_resets) == (text_of(9), 0)


async def test_hundreds_of_cancels_leave_the_engine_idle_and_the_next_answer_whole() -> None:
    engine = FakeEngine(SCRIPT, max_sequences=4)
    async with installation() as gea, gea.client() as client:
        gea.limits = replace(gea.limits, max_queue_depth=1_000)
        await start_path(gea, engine)
        ends = await asyncio.gather(*(cancel_soon(gea, client, f"r-{number}") for number in range(300)))
        assert {end.status for end in ends} <= {EndStatus.CANCELLED, EndStatus.COMPLETED}
        assert EndStatus.CANCELLED in {end.status for end in ends}
        assert (engine.statistics().running, engine.statistics().waiting) == (0, 0)
        assert (await client.complete("tell me", **SHORT)).text == TEXT
        await all_committed(gea, GENERATION, Pool.GENERATION)
        assert gea.workers["generation-1"].cancellations.statistics()["watched"] == 0


async def cancel_soon(gea: Installation, client: GeaClient, request_id: str) -> End:
    """Cancel a request as soon as something of its answer has come, and return its end."""
    chunks = []
    async for chunk in client.generate("tell me", request_id=request_id, **SHORT):
        cancel(gea, request_id)
        chunks.append(chunk)
    (end,) = (chunk.end for chunk in chunks if chunk.end is not None)
    return end
