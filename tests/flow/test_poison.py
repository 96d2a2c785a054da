"""Records made to do harm: each ends its own request at most, and takes down no pool and no neighbour."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import msgspec
import pytest

from schemas.codec import pack
from schemas.envelope import JSON, Headers, Origin, Reply, RoutedRequest
from schemas.errors import InvalidRequestError
from schemas.intent import IntentResult
from schemas.request import GenerationRequest
from schemas.retrieval import Passage, RetrievalResult
from schemas.tokens import End, EndStatus, Kind
from schemas.worker import Pool, RouteStamp
from streams.broker import Producer, Record
from streams.client import GeaClient
from streams.routing import murmur2_partition
from streams.topics import REQUESTS, TOKENS, pool_topic
from tests.flow.harness import DIALOGUE, NUM_PARTITIONS, Installation, installation
from tests.flow.records import all_committed, dead_letters, end_of, send_raw
from workers.generation.engine.fake import FakeEngine
from workers.generation.stage import GenerationHandler

HUGE_NUMBER = b'{"prompt": "x", "passages": [{"text": "a", "semantic_rank": ' + b"9" * 40 + b"}]}"
LONG = "\x00" * 300_000  # four characters each where it is quoted


async def last_end(gea: Installation, client: GeaClient, prompt: str) -> End:
    """Ask and return the end, which has come once."""
    chunks = [chunk async for chunk in client.generate(prompt, request_id="r-1")]
    assert [record.kind for record in gea.tokens_of("r-1")].count(Kind.END) == 1
    end = chunks[-1].end
    assert end is not None
    return end


def assert_alive(gea: Installation) -> None:
    assert not any(running.task.done() for running in gea.workers.values())


@pytest.mark.parametrize(
    ("body", "headers", "code"),
    [
        (HUGE_NUMBER, {"content-type": JSON}, "invalid_request"),
        (b'{"prompt": "x", "seed": ' + b"9" * 4_000 + b"}", {"content-type": JSON}, "invalid_request"),
        (b'{"prompt": "x", "a": ' + b"[" * 100_000, {"content-type": JSON}, "undecodable"),
        (msgpack.packb({"prompt": "x"}), {"reply_topic": LONG}, "invalid_request"),
        (msgpack.packb({"prompt": "x"}), {"content-type": LONG}, "invalid_request"),
        (msgpack.packb({"prompt": "x"}), {"ce_type": LONG}, "unsupported_version"),
        (msgpack.packb({"prompt": "x", "strategy": "s" * 500_000}), {}, "invalid_request"),
        (msgpack.packb({"prompt": "x", "passages": [{"text": "a", "title": "t" * 1_000}]}), {}, "invalid_request"),
        (msgpack.packb({"prompt": "x", "passages": [{"text": "a", "score": float("nan")}]}), {}, "invalid_request"),
        (msgpack.packb({"prompt": "x", "passages": [{"text": "a", "keyword_rank": -1}]}), {}, "invalid_request"),
    ],
)
async def test_a_poisonous_request_ends_and_the_router_lives_on(
    body: bytes, headers: dict[str, str], code: str
) -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine("fine"))
        await send_raw(gea, body, [("request_id", "bad-1"), *headers.items()])
        end = await end_of(gea, client, "bad-1")
        assert end.failure is not None
        assert end.failure.code == code
        assert len(end.failure.message) < 2_000
        assert (await client.complete("tell me", **DIALOGUE)).text == "fine"
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        assert_alive(gea)


async def test_headers_that_are_no_text_end_the_request_under_its_id() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start(Pool.ROUTER, "router-1")
        producer = await gea.broker.producer()
        body = pack(GenerationRequest(prompt="x"))
        headers: Headers = (("request_id", b"other"), ("request_id", b"bad-1"), ("tenant", b"\xff"))
        await producer.send(REQUESTS, body, key=b"k", headers=headers)
        end = await end_of(gea, client, "bad-1")
        assert end.failure is not None
        assert end.failure.field == "tenant"
        await producer.send(REQUESTS, body, key=b"k", headers=(("request_id", b"\xff"),))
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        assert [letter.code for letter in dead_letters(gea)] == ["invalid_request"]
        assert_alive(gea)


async def test_an_undecodable_body_is_told_where_the_caller_listens() -> None:
    other = 1 - murmur2_partition(b"bad-1", NUM_PARTITIONS)
    async with installation() as gea:
        await gea.start(Pool.ROUTER, "router-1")
        await send_raw(gea, b"\xc1", [("request_id", "bad-1"), ("reply_partition", str(other))])
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        assert [record.partition for record in gea.broker.records(TOKENS)] == [other]


@pytest.mark.parametrize("bad", [b"\xc1", msgpack.packb({"prompt": "x", "max_tokens": 0})])
async def test_a_bad_repeat_does_not_end_a_request_that_waits_and_gets_its_stream(bad: bytes) -> None:
    other = 1 - murmur2_partition(b"r-1", NUM_PARTITIONS)
    async with installation() as gea, gea.client() as client:
        await gea.start(Pool.ROUTER, "router-1")
        asking = asyncio.create_task(client.complete("tell me", request_id="r-1", **DIALOGUE))
        await gea.broker.until(lambda: bool(gea.broker.records(pool_topic(Pool.GENERATION, "blue"))))
        await send_raw(gea, bad, [("request_id", "r-1"), ("reply_partition", str(other))])
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        await gea.start(Pool.GENERATION, "generation-1", FakeEngine("fine"))
        assert (await asking).text == "fine"
        assert [r.kind for r in gea.tokens_of("r-1") if r.kind in (Kind.SEE, Kind.END)] == [
            *([Kind.SEE, Kind.END] if other == 0 else [Kind.END, Kind.SEE])
        ]
        assert len(dead_letters(gea)) == 1


async def test_a_request_that_was_refused_may_come_again_and_be_answered_by_a_take_over() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start(Pool.ROUTER, "router-1")
        await send_raw(gea, msgpack.packb({"prompt": ""}), [("request_id", "r-1")])
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        asking = asyncio.create_task(client.complete("tell me", request_id="r-1", **DIALOGUE))
        await gea.broker.until(lambda: bool(gea.broker.records(pool_topic(Pool.GENERATION, "blue"))))
        await gea.start(Pool.GENERATION, "generation-1", FakeEngine("fine"))  # the record was there before it
        assert (await asking).text == "fine"


async def test_an_annotation_too_large_for_a_record_costs_itself_and_not_the_answer() -> None:
    def with_library(routed: RoutedRequest) -> RoutedRequest:
        passages = tuple(Passage(text="x" * 100_000, passage_id=str(n)) for n in range(20))
        return msgspec.structs.replace(routed, retrieval=RetrievalResult(passages=passages))

    async with installation() as gea, gea.client() as client:
        gea.retrieval._annotate = with_library
        await gea.start_all(FakeEngine("fine"))
        answer = await client.complete("How long can I return shoes?")
        assert answer.end.status is EndStatus.COMPLETED
        assert answer.end.passage_ids == ()
        assert_alive(gea)


async def test_a_request_that_outgrows_a_record_between_the_pools_ends() -> None:
    def bloated(routed: RoutedRequest) -> RoutedRequest:
        return msgspec.structs.replace(routed, intent=IntentResult(intent="x" * 2_000_000, confidence=1.0))

    async with installation() as gea, gea.client() as client:
        gea.intent._annotate = bloated
        gea.intent.give_up = lambda routed, error: bloated(routed)  # type: ignore[method-assign]
        await gea.start_all(FakeEngine("fine"))
        end = await last_end(gea, client, "How long?")
        assert (end.status, end.failure.code if end.failure else "") == (EndStatus.FAILED, "invalid_request")
        assert_alive(gea)


class NarrowProducer:
    """Takes no token record above `max_bytes`, as a broker whose topic was set so."""

    def __init__(self, inner: Producer, max_bytes: int) -> None:
        self._inner = inner
        self._max_bytes = max_bytes

    async def send(self, topic: str, value: bytes | None, **place: Any) -> Record:
        if topic == TOKENS and len(value or b"") > self._max_bytes:
            raise InvalidRequestError("the record is too large")
        return await self._inner.send(topic, value, **place)

    async def close(self) -> None:
        await self._inner.close()


@pytest.mark.parametrize("max_bytes", [2_000, 10])
async def test_an_end_too_large_for_its_topic_becomes_a_failed_one_or_a_dead_letter(max_bytes: int) -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine("fine"))
        handler = gea.workers["generation-1"].handler
        assert isinstance(handler, GenerationHandler)
        inner, handler._outbox.producer = (
            handler._outbox.producer,
            NarrowProducer(await gea.broker.producer(), max_bytes),
        )
        body = GenerationRequest(prompt="x" * 3_000, explain=True, **DIALOGUE)
        await send_raw(gea, pack(body), [("request_id", "r-1")])
        if max_bytes > 1_000:
            end = await end_of(gea, client, "r-1")
            assert (end.status, end.failure.code if end.failure else "") == (EndStatus.FAILED, "invalid_request")
        else:
            await gea.broker.until(lambda: len(dead_letters(gea)) == 1)
        await all_committed(gea, pool_topic(Pool.GENERATION, "blue"), Pool.GENERATION)
        handler._outbox.producer = inner
        assert (await client.complete("tell me", **DIALOGUE)).text == "fine"
        assert_alive(gea)


@pytest.mark.parametrize("pool", [Pool.INTENT, Pool.RETRIEVAL, Pool.GENERATION])
@pytest.mark.parametrize(
    "change",
    [
        {"route": RouteStamp(intent="a b", retrieval="a b", generation="a b")},
        {"reply": Reply(topic=TOKENS, partition=77)},
        {"reply": Reply(topic=TOKENS, partition=-1)},
        {"request_id": ""},
    ],
)
async def test_a_routed_request_that_points_nowhere_takes_no_pool_down(pool: Pool, change: dict[str, object]) -> None:
    routed = RoutedRequest(
        request_id="r-1",
        request=GenerationRequest(prompt="x"),
        reply=Reply(topic=TOKENS, partition=0),
        origin=Origin(partition=0, offset=0),
        seed=1,
        received_ms=1,
        deadline_ms=2**50,
    )
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine("fine"))
        producer = await gea.broker.producer()
        bad = pack(msgspec.structs.replace(routed, **change))
        await producer.send(pool_topic(pool, "blue"), bad, headers=(("request_id", b"r-1"),), partition=0)
        await gea.broker.until(lambda: len(dead_letters(gea)) == 1)
        assert (await client.complete("tell me", **DIALOGUE)).text == "fine"
        await all_committed(gea, pool_topic(pool, "blue"), pool)
        assert_alive(gea)
