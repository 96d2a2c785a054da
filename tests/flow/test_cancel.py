"""A cancel reaches a request wherever it is, and ends it once.

What happens inside generation is in `test_cancel_generation`.
"""

from __future__ import annotations

import asyncio

import pytest

from schemas.errors import RequestFailedError
from schemas.tokens import EndStatus, FinishReason, Kind
from schemas.worker import Pool
from streams.topics import REQUESTS, TOKENS
from tests.flow.asked import (
    ANNOTATING,
    TOPICS,
    Leased,
    annotator,
    arrived,
    asking,
    check_cancelled_once,
    heard,
    occupied,
)
from tests.flow.harness import DIALOGUE, installation
from tests.flow.holds import Gate
from tests.streams.token_fakes import until
from workers.generation.engine.fake import FakeEngine
from workers.router.waiting_room import RoomLimits


async def test_a_cancel_that_comes_before_its_request_holds() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        await client.cancel("r-1", reason="changed my mind")
        await heard(gea)
        answer = await (await asking(client))
        await check_cancelled_once(gea, answer, "changed my mind")
        assert [gea.broker.records(TOPICS[pool]) for pool in Pool if pool is not Pool.ROUTER] == [[], [], []]


async def test_a_request_that_waits_for_a_router_is_never_admitted() -> None:
    async with installation() as gea, gea.client() as client:
        asked = await asking(client)
        await arrived(gea, REQUESTS)
        await client.cancel("r-1")
        await gea.start_all()  # workers that start later honour an earlier cancel
        await check_cancelled_once(gea, await asked, "cancelled on request")
        assert gea.broker.records(TOPICS[Pool.INTENT]) == []


@pytest.mark.parametrize("why", ["cancelled", "reader is gone", "deadline"])
async def test_a_request_that_waits_for_room_at_the_router_ends_there(why: str) -> None:
    gate = Gate(stop_at=1)
    async with installation() as gea, gea.client() as client:
        leased = Leased(gea)
        gea.room_limits = RoomLimits(max_tokens_per_worker=1)
        first = await occupied(gea, client, FakeEngine("Within 30 days.", pause=gate), gate)
        deadline_s = 0.3 if why == "deadline" else None
        second = await asking(client, "r-1", reader_lease_s=30.0, deadline_s=deadline_s, **DIALOGUE)
        await leased.watched(Pool.ROUTER)
        if why == "deadline":
            with pytest.raises(RequestFailedError) as caught:
                await second
            assert caught.value.failure_code == "deadline_exceeded"
        else:
            if why == "cancelled":
                await client.cancel("r-1", reason=why)
            else:
                leased.clock.advance(31_000)
            answer = await second
            assert answer.end.status is EndStatus.CANCELLED
            assert answer.end.failure is not None
            assert answer.end.failure.message == why
        assert [record.kind for record in gea.tokens_of("r-1")].count(Kind.END) == 1
        assert not first.done()
        gate.opened.set()
        assert (await first).text == "Within 30 days."
        assert len(gea.broker.records(TOPICS[Pool.GENERATION])) == 1


@pytest.mark.parametrize("pool", ANNOTATING)
async def test_a_request_in_the_queue_of_a_pool_is_not_worked_on(pool: Pool) -> None:
    async with installation() as gea, gea.client() as client:
        for earlier in list(Pool)[: list(Pool).index(pool)]:
            await gea.start(earlier, f"{earlier}-1")
        asked = await asking(client)
        await arrived(gea, TOPICS[pool])
        await client.cancel("r-1", reason="too late")
        await gea.start(pool, f"{pool}-1")
        await check_cancelled_once(gea, await asked, "too late")
        assert annotator(gea, pool).batches == []


@pytest.mark.parametrize("pool", ANNOTATING)
async def test_a_request_is_cancelled_while_its_batch_is_annotated_and_its_neighbours_go_on(pool: Pool) -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        stage = annotator(gea, pool)
        stage.gate.clear()
        asked = {name: await asking(client, name) for name in ("r-1", "r-2")}
        await until(lambda: sum(stage.batches) == 2)
        await client.cancel("r-1")
        cancelled = await asked["r-1"]  # at once: the batch still stands
        assert not asked["r-2"].done()
        stage.gate.set()
        assert (await asked["r-2"]).end.status is EndStatus.COMPLETED
        await check_cancelled_once(gea, cancelled, "cancelled on request")
        generated = gea.broker.records(TOPICS[Pool.GENERATION])
        assert len(generated) == 1


@pytest.mark.parametrize("pool", ANNOTATING)
async def test_a_batch_that_nobody_waits_for_any_more_is_given_up(pool: Pool) -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        stage = annotator(gea, pool)
        stage.gate.clear()
        asked = await asking(client)
        await until(lambda: stage.batches == [1])
        await client.cancel("r-1")
        await check_cancelled_once(gea, await asked, "cancelled on request")
        await until(lambda: stage.num_given_up == 1)


async def test_a_request_in_the_engines_queue_is_cancelled_before_its_turn() -> None:
    gate = Gate(stop_at=1)
    engine = FakeEngine("Within 30 days.", pause=gate, max_sequences=1)
    async with installation() as gea, gea.client() as client:
        first = await occupied(gea, client, engine, gate)
        second = await asking(client, "r-1", **DIALOGUE)
        await until(lambda: engine.statistics().waiting == 1)
        await client.cancel("r-1")
        cancelled = await second
        assert engine.statistics().waiting == 0
        gate.opened.set()
        assert (await first).text == "Within 30 days."
        await check_cancelled_once(gea, cancelled, "cancelled on request")


async def test_a_request_is_cancelled_in_mid_stream_with_the_text_that_is_out() -> None:
    gate = Gate(stop_at=6)
    engine = FakeEngine("Within 30 days.", pause=gate)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(engine)
        asked = await asking(client, **DIALOGUE)
        await gate.reached.wait()
        await client.cancel("r-1", reason="enough")
        await check_cancelled_once(gea, await asked, "enough", text="Within")
        assert (engine.statistics().running, engine.statistics().waiting) == (0, 0)


async def test_a_cancel_of_what_has_ended_or_is_unknown_does_nothing_and_neither_does_a_second_one() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        answer = await (await asking(client))
        before = len(gea.broker.records(TOKENS))
        for request_id in ("r-1", "r-1", "unknown"):
            await client.cancel(request_id)
            await heard(gea, request_id)
        again = await client.replay("r-1").answer()
        assert (again.text, again.end) == (answer.text, answer.end)
        repeat = await (await asking(client))  # the same id: the first one's stream
        assert (repeat.text, repeat.end.status) == (answer.text, EndStatus.COMPLETED)
        assert [record.kind for record in gea.tokens_of("r-1")].count(Kind.END) == 1
        assert before == len([record for record in gea.tokens_of("r-1") if record.kind is not Kind.SEE])


async def test_two_cancels_make_one_end() -> None:
    gate = Gate(stop_at=6)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine("Within 30 days.", pause=gate))
        asked = await asking(client, **DIALOGUE)
        await gate.reached.wait()
        await asyncio.gather(client.cancel("r-1", reason="one"), client.cancel("r-1", reason="two"))
        answer = await asked
        await heard(gea)
        assert answer.end.failure is not None
        await check_cancelled_once(gea, answer, answer.end.failure.message, text="Within")


@pytest.mark.parametrize("pool", [*ANNOTATING, Pool.GENERATION])
async def test_another_tenant_cannot_cancel(pool: Pool) -> None:
    gate = Gate(stop_at=3)
    async with installation() as gea, gea.client() as client, gea.client(tenant="other") as other:
        await gea.start_all(FakeEngine("Within 30 days.", pause=gate))
        for each in ANNOTATING:
            annotator(gea, each).gate.clear()
        asked = await asking(client)
        for each in ANNOTATING:
            if each is pool:
                break
            annotator(gea, each).gate.set()
        if pool is Pool.GENERATION:
            await gate.reached.wait()
        else:
            await until(lambda: annotator(gea, pool).batches == [1])
        await other.cancel("r-1")
        await heard(gea, "r-1", "other")
        for each in ANNOTATING:
            annotator(gea, each).gate.set()
        gate.opened.set()
        answer = await asked
    assert (answer.end.status, answer.end.finish_reason) == (EndStatus.COMPLETED, FinishReason.STOP)
    assert "30 days" in answer.text


async def test_a_thousand_starts_and_cancels_leave_nothing_behind_and_cost_no_speed() -> None:
    num_at_once, num_rounds = 50, 20

    engine = FakeEngine("x" * 1_000, pause=lambda: asyncio.sleep(0.005))
    async with installation() as gea, gea.client(timeout_s=60) as client:
        await gea.start(Pool.ROUTER, "router-1")
        await gea.start(Pool.GENERATION, "generation-1", engine)

        async def steps_of_answers() -> int:
            before = engine.statistics().num_steps
            answers = [client.complete("hello", max_tokens=3, **DIALOGUE) for _ in range(num_at_once)]
            assert {answer.text for answer in await asyncio.gather(*answers)} == {"xxx"}
            return engine.statistics().num_steps - before

        async def start_and_cancel(number: int) -> EndStatus:
            stream = client.generate("hello", request_id=f"r-{number}", **DIALOGUE)
            await anext(stream)
            await client.cancel(stream.request_id)
            return (await stream.answer()).end.status

        steps, tasks = await steps_of_answers(), len(asyncio.all_tasks())
        for start in range(0, num_at_once * num_rounds, num_at_once):
            ends = await asyncio.gather(*(start_and_cancel(start + number) for number in range(num_at_once)))
            assert set(ends) == {EndStatus.CANCELLED}
        statistics = engine.statistics()
        assert (statistics.running, statistics.waiting, statistics.tokens_in_flight) == (0, 0, 0)
        assert await steps_of_answers() == steps
        await until(lambda: len(asyncio.all_tasks()) <= tasks)
        assert all(worker.cancellations.statistics()["watched"] == 0 for worker in gea.workers.values())


async def test_the_end_of_a_cancelled_request_is_counted_as_aborted() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        gea.intent.gate.clear()
        asked = await asking(client)
        await until(lambda: gea.intent.batches == [1])
        await client.cancel("r-1")
        await asked
        labels = {"pool": "intent", "colour": "blue", "finished_reason": "abort"}
        assert gea.metrics["intent-1"].registry.get_sample_value("gea_request_success_total", labels) == 1
