"""One request through router, intent, retrieval and generation, all in memory."""

from __future__ import annotations

import asyncio

import pytest

from schemas.errors import RequestFailedError
from schemas.request import GenerationRequest, Retrieval, Strategy
from schemas.retrieval import Passage
from schemas.tokens import EndStatus, FinishReason, Kind
from schemas.worker import Pool
from streams.topics import DEAD_LETTER, REQUESTS, pool_group, pool_topic
from tests.flow.harness import DIALOGUE, PASSAGE, installation
from tests.flow.planners import GREETING
from workers.generation.engine.fake import FakeEngine


async def test_an_answer_streams_through_all_pools_and_ends_once() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        answer = await client.complete("How long can I return shoes?", request_id="r-1", explain=True)
    assert answer.end.status is EndStatus.COMPLETED
    assert (answer.end.strategy, answer.end.intent) == ("knowledge", "return_refund")
    assert "return_refund" in answer.end.strategy_reason
    assert answer.end.passage_ids == (PASSAGE.passage_id,)
    assert answer.end.explanation is not None
    assert answer.end.explanation.retrieval is not None
    assert answer.end.explanation.retrieval.passages == (PASSAGE,)
    assert PASSAGE.text in answer.end.explanation.prompt
    records = gea.tokens_of("r-1")
    assert [record.kind for record in records].count(Kind.END) == 1
    assert records[0].claim is not None
    assert answer.end.num_records == len(records)


async def test_text_of_the_model_is_streamed_as_it_stands() -> None:
    text = "🌶️ 你好 é👨‍👩‍👧 done."
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(text))
        chunks = [chunk async for chunk in client.generate("hello", **DIALOGUE)]
    assert "".join(chunk.text for chunk in chunks) == text
    end = chunks[-1].end
    assert end is not None
    assert end.usage.completion_tokens == len(text.encode()) + 1


async def test_stages_are_skipped_as_the_request_says() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        await client.complete("hello", **DIALOGUE)
        assert (gea.intent.batches, gea.retrieval.batches) == ([], [])
        await client.complete("hello", retrieval=Retrieval.OFF)
        assert (gea.intent.batches, gea.retrieval.batches) == ([1], [])
        given = Passage(text="We open at nine.", passage_id="mine")
        answer = await client.complete("When do you open?", passages=(given,))
        assert (gea.intent.batches, gea.retrieval.batches) == ([1, 1], [])
    assert answer.end.passage_ids == ("mine",)


async def test_requests_are_batched_on_the_consumer_side() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start(Pool.ROUTER, "router-1")
        streams = [asyncio.create_task(client.complete(f"question {n}", session_id="s-1")) for n in range(8)]
        await gea.broker.until(lambda: len(gea.broker.records(pool_topic(Pool.INTENT, "blue"))) == 8)
        for pool in (Pool.INTENT, Pool.RETRIEVAL, Pool.GENERATION):
            await gea.start(pool, f"{pool}-1")
        await asyncio.gather(*streams)
    assert gea.intent.batches == [8]


async def test_an_annotator_that_fails_costs_its_result_and_not_the_answer() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        gea.intent.failure = gea.retrieval.failure = RuntimeError("broken")
        answer = await client.complete("How long?", explain=True)
    assert answer.end.status is EndStatus.COMPLETED
    assert answer.end.explanation is not None
    assert answer.end.explanation.intent is not None
    assert answer.end.explanation.intent.failure == "internal"


async def test_a_session_remembers_its_turns_and_another_tenant_or_session_does_not_see_them() -> None:
    engine = FakeEngine("Blue.")
    async with installation() as gea, gea.client() as client:
        await gea.start_all(engine)
        await client.complete("My colour is blue.", session_id="s-1", **DIALOGUE)
        await client.complete("Which colour?", session_id="s-1", **DIALOGUE)
        await client.complete("Which colour?", session_id="s-2", **DIALOGUE)
    prompts = [engine.tokenizer.decode(request.prompt) for request in engine.requests]
    assert "My colour is blue." in prompts[1]
    assert "Blue." in prompts[1]
    assert "My colour is blue." not in prompts[2]


async def test_without_the_store_answers_go_on_without_memory() -> None:
    engine = FakeEngine("Blue.")
    async with installation() as gea, gea.client() as client:
        await gea.start_all(engine)
        gea.store.down = True
        for _ in range(2):
            answer = await client.complete("My colour is blue.", session_id="s-1", **DIALOGUE)
            assert answer.end.status is EndStatus.COMPLETED
    assert engine.tokenizer.decode(engine.requests[1].prompt).count("My colour is blue.") == 1


async def test_a_template_answers_without_the_engine() -> None:
    engine = FakeEngine("not me")
    async with installation() as gea, gea.client() as client:
        await gea.start_all(engine)
        answer = await client.complete("hi", intent="greeting", strategy=Strategy.TEMPLATE, retrieval=Retrieval.OFF)
        assert answer.end.strategy == "template"
        with_intent = await client.complete(GenerationRequest(prompt="hi", strategy=Strategy.TEMPLATE))
    assert with_intent.text != GREETING  # the annotator calls everything a return
    assert not engine.requests


async def test_every_choice_of_n_is_streamed_with_its_own_end() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine("same"))
        answer = await client.complete("hello", n=3, **DIALOGUE)
    assert answer.texts == ("same", "same", "same")
    assert [choice.num_tokens for choice in answer.end.choices] == [5, 5, 5]


async def test_max_tokens_ends_an_answer_as_incomplete() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine("abcdefgh"))
        answer = await client.complete("hello", max_tokens=3, **DIALOGUE)
    assert (answer.text, answer.end.status, answer.end.finish_reason) == (
        "abc",
        EndStatus.INCOMPLETE,
        FinishReason.LENGTH,
    )


async def test_a_prompt_that_can_never_fit_is_refused_and_the_next_one_answered() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine("short", max_context=300))
        with pytest.raises(RequestFailedError) as caught:
            await client.complete("x" * 1_000, **DIALOGUE)
        assert caught.value.failure_code == "prompt_too_long"
        assert (await client.complete("hello", **DIALOGUE)).text == "short"


async def test_nothing_stays_uncommitted_and_nothing_is_dead_lettered() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        await asyncio.gather(*(client.complete(f"question {n}") for n in range(20)))
        for name in list(gea.workers):
            await gea.stop(name)
        for topic, pool in ((REQUESTS, Pool.ROUTER), (pool_topic(Pool.GENERATION, "blue"), Pool.GENERATION)):
            for place in gea.broker.places(topic):
                end = gea.broker.log(place).end
                assert (gea.broker.committed(pool_group(pool, "blue"), place) or 0) == end
        assert gea.broker.records(DEAD_LETTER) == []


async def test_metrics_count_what_was_published() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine("four"))
        for _ in range(3):
            await client.complete("hello", **DIALOGUE)
        metrics = gea.metrics["generation-1"]
        labels = {"pool": "generation", "colour": "blue"}

        def value(name: str, **more: str) -> float | None:
            return metrics.registry.get_sample_value(name, {**labels, **more})

        await gea.stop("generation-1")  # the last end is counted after its record is written
        assert value("gea_generation_tokens_total") == 3 * 5
        assert value("gea_request_success_total", finished_reason="stop") == 3
        assert value("gea_time_to_first_token_seconds_count") == 3
        assert value("gea_inter_token_latency_seconds_count") == 3 * 4


async def test_nothing_of_a_stop_string_that_spans_records_is_published() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine("Hello world, this goes on."))
        answer = await client.complete("hello", request_id="r-1", stop=("lo world, this",), n=2, **DIALOGUE)
    assert (answer.texts, answer.end.finish_reason) == (("Hel", "Hel"), FinishReason.STOP)
    assert sorted("".join(record.text for record in gea.tokens_of("r-1"))) == sorted("HelHel")
