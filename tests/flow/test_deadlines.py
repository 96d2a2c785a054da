"""A deadline reaches a request wherever it is, and ends it in its own time."""

from __future__ import annotations

import pytest

from schemas.errors import RequestFailedError, ResponseTimeoutError
from schemas.tokens import EndStatus, Kind
from schemas.worker import Pool
from streams.clock import now_ms
from streams.topics import pool_topic
from tests.flow.asked import ANNOTATING, TOPICS, annotator, arrived, asking, occupied
from tests.flow.harness import DIALOGUE, installation
from tests.flow.holds import TEXT, Gate
from tests.flow.records import all_committed, end_of
from tests.streams.token_fakes import until
from workers.generation.engine.fake import FakeEngine


@pytest.mark.parametrize("pool", ANNOTATING)
async def test_a_stuck_annotator_holds_no_request_beyond_half_of_its_time(pool: Pool) -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        annotator(gea, pool).gate.clear()
        answer = await client.complete("How long?", deadline_s=0.4, explain=True)
        assert answer.end.status is EndStatus.COMPLETED
        explanation = answer.end.explanation
        assert explanation is not None
        result = explanation.intent if pool is Pool.INTENT else explanation.retrieval
        assert result is not None
        assert result.failure == "unavailable"
        await until(lambda: annotator(gea, pool).num_given_up == 1)
        await all_committed(gea, TOPICS[pool], pool)


async def test_a_request_of_a_long_batch_leaves_it_in_its_own_time() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start(Pool.ROUTER, "router-1")
        patient, hasty = await asking(client, "r-1"), await asking(client, "r-2", deadline_s=0.4)
        await arrived(gea, TOPICS[Pool.INTENT], 2)
        gea.intent.gate.clear()
        for pool in (Pool.INTENT, Pool.RETRIEVAL, Pool.GENERATION):
            await gea.start(pool, f"{pool}-1")
        assert (await hasty).end.status is EndStatus.COMPLETED
        assert not patient.done()
        gea.intent.gate.set()
        assert (await patient).end.status is EndStatus.COMPLETED


async def test_a_deadline_in_the_engines_queue_ends_the_request_in_its_time_not_at_its_turn() -> None:
    gate = Gate(stop_at=1)
    engine = FakeEngine("Within 30 days.", pause=gate, max_sequences=1)
    async with installation() as gea, gea.client() as client:
        first = await occupied(gea, client, engine, gate)
        second = await asking(client, "r-1", deadline_s=0.2, **DIALOGUE)
        with pytest.raises(RequestFailedError) as caught:
            await second
        assert caught.value.failure_code == "deadline_exceeded"
        assert engine.statistics().waiting == 0
        assert not first.done()
        assert [record.kind for record in gea.tokens_of("r-1")].count(Kind.END) == 1
        gate.opened.set()
        assert (await first).text == "Within 30 days."


@pytest.mark.parametrize("pool", ANNOTATING)
async def test_a_deadline_in_the_queue_of_a_pool_ends_the_request_there(pool: Pool) -> None:
    async with installation() as gea, gea.client() as client:
        for earlier in list(Pool)[: list(Pool).index(pool)]:
            await gea.start(earlier, f"{earlier}-1")
        late_ms = now_ms() + 200
        asked = await asking(client, deadline_s=0.15, timeout_s=5.0)
        await arrived(gea, TOPICS[pool])
        await until(lambda: now_ms() > late_ms)
        await gea.start(pool, f"{pool}-1")
        with pytest.raises(RequestFailedError) as caught:
            await asked
        assert caught.value.failure_code == "deadline_exceeded"
        await all_committed(gea, TOPICS[pool], pool)
        assert [record.kind for record in gea.tokens_of("r-1")].count(Kind.END) == 1


async def test_a_deadline_that_passes_during_generation_ends_the_request_and_frees_the_engine() -> None:
    gate = Gate(stop_at=10)
    engine = FakeEngine(TEXT, pause=gate)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(engine)
        with pytest.raises(RequestFailedError) as caught:
            await client.complete("tell me", request_id="r-1", deadline_s=0.4, timeout_s=10, **DIALOGUE)
        assert caught.value.failure_code == "deadline_exceeded"
        assert (engine.statistics().running, engine.statistics().waiting) == (0, 0)
        await all_committed(gea, pool_topic(Pool.GENERATION, "blue"), Pool.GENERATION)


async def test_a_deadline_that_passes_in_the_queue_is_told_when_a_worker_comes() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start(Pool.ROUTER, "router-1")
        with pytest.raises(ResponseTimeoutError) as caught:
            await client.complete("tell me", deadline_s=0.05, timeout_s=0.3, **DIALOGUE)
        engine = FakeEngine(TEXT)
        await gea.start(Pool.GENERATION, "generation-1", engine)
        end = await end_of(gea, client, caught.value.request_id)
        assert end.failure is not None
        assert end.failure.code == "deadline_exceeded"
        assert not engine.requests
