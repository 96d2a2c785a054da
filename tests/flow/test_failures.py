"""What goes wrong on the way: every request ends exactly once, whatever fails."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import msgpack
import pytest

from schemas.codec import pack
from schemas.errors import BrokerUnavailableError, RequestFailedError, ResponseTimeoutError
from schemas.request import GenerationRequest
from schemas.tokens import EndStatus, FinishReason, Kind
from schemas.worker import Pool, WorkerState
from streams.routing import murmur2_partition
from streams.topics import DEAD_LETTER, REQUESTS, TOKENS, pool_group, pool_topic
from tests.flow.harness import DIALOGUE, NUM_PARTITIONS, installation
from tests.flow.holds import TEXT, Gate, answering
from tests.flow.records import all_committed, dead_letters, end_of, send_raw, view_of
from tests.streams.token_fakes import until
from workers.generation.engine.fake import FakeEngine
from workers.router.admission import load_of


async def test_a_killed_worker_is_followed_by_another_that_ends_the_request_once() -> None:
    async with installation() as gea, gea.client() as client:
        asking = await answering(gea, client, Gate(stop_at=20))
        await gea.broker.until(lambda: view_of(gea, "r-1").next_seq() >= 12)
        await gea.kill("generation-1")
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(TEXT))
        answer = await asking
        assert answer.text == TEXT
        assert view_of(gea, "r-1").end == answer.end
        claims = [record for record in gea.tokens_of("r-1") if record.claim is not None]
        assert claims[0].epoch < claims[1].epoch
        assert [record.kind for record in gea.tokens_of("r-1")].count(Kind.END) == 1
        await all_committed(gea, pool_topic(Pool.GENERATION, "blue"), Pool.GENERATION)


async def test_a_request_that_ended_before_its_commit_is_not_answered_again() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all()
        answer = await client.complete("tell me", request_id="r-1", **DIALOGUE)
        place = next(p for p in gea.broker.places(pool_topic(Pool.GENERATION, "blue")) if gea.broker.log(p).end)
        await gea.kill("generation-1")
        gea.broker.group(pool_group(Pool.GENERATION, "blue")).committed.pop(place, None)
        engine = FakeEngine("something else")
        await gea.start(Pool.GENERATION, "generation-2", engine)
        await all_committed(gea, pool_topic(Pool.GENERATION, "blue"), Pool.GENERATION)
        assert not engine.requests
        assert (await client.replay("r-1").answer()).text == answer.text


async def test_a_paused_owner_that_wakes_up_is_ignored_by_readers() -> None:
    gate = Gate(stop_at=8)
    async with installation() as gea, gea.client() as client:
        asking = await answering(gea, client, gate)
        await gea.broker.kill("generation-1")  # it does not notice
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(TEXT))
        answer = await asking
        gate.opened.set()
        await gea.broker.until(lambda: [r.kind for r in gea.tokens_of("r-1")].count(Kind.END) == 2)
        assert answer.text == TEXT
        assert view_of(gea, "r-1").end == answer.end
        assert (await client.replay("r-1").answer()).end == answer.end


async def test_a_drained_worker_finishes_what_it_began() -> None:
    gate = Gate(stop_at=10)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(TEXT, pause=gate))
        asking = asyncio.create_task(client.complete("tell me", **DIALOGUE))
        await gate.reached.wait()
        stopping = asyncio.create_task(gea.stop("generation-1"))
        await asyncio.sleep(0)
        gate.opened.set()
        await stopping
        assert (await asking).text == TEXT
        await all_committed(gea, pool_topic(Pool.GENERATION, "blue"), Pool.GENERATION)


async def test_an_engine_that_dies_takes_its_worker_down_and_loses_nothing() -> None:
    gate = Gate(stop_at=10)
    engine = FakeEngine(TEXT, pause=gate)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(engine)
        asking = asyncio.create_task(client.complete("tell me", **DIALOGUE))
        await gate.reached.wait()
        engine.die("out of order")
        dead = gea.workers.pop("generation-1")
        await asyncio.wait((dead.task,))
        assert dead.task.exception() is not None
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(TEXT))
        assert (await asking).text == TEXT


async def test_an_engine_that_dies_while_its_worker_drains_ends_the_wait() -> None:
    gate = Gate(stop_at=10)
    engine = FakeEngine(TEXT, pause=gate)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(engine)
        asking = asyncio.create_task(client.complete("tell me", **DIALOGUE))
        await gate.reached.wait()
        dying = gea.workers.pop("generation-1")
        dying.stop.set()
        await until(lambda: dying.worker.state is WorkerState.DRAINING)
        engine.die("out of order")
        started = time.monotonic()
        await asyncio.wait((dying.task,))
        assert time.monotonic() - started < 4  # the limit is 5
        assert dying.task.exception() is not None
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(TEXT))
        assert (await asking).text == TEXT


async def test_without_a_generation_worker_the_client_times_out_and_the_answer_is_there_later() -> None:
    async with installation() as gea, gea.client(timeout_s=0.3) as client:
        for pool in (Pool.ROUTER, Pool.INTENT, Pool.RETRIEVAL):
            await gea.start(pool, f"{pool}-1")
        with pytest.raises(ResponseTimeoutError, match="replayed") as caught:
            await client.complete("tell me", **DIALOGUE)
        await gea.start(Pool.GENERATION, "generation-1", FakeEngine(TEXT))
        answer = await client.replay(caught.value.request_id, timeout_s=10).answer()
    assert answer.text == TEXT


async def test_a_repeat_gets_the_first_ones_stream_and_costs_one_generation() -> None:
    engine = FakeEngine(TEXT)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(engine)
        first = await client.complete("tell me", request_id="r-1", **DIALOGUE)
        again = await client.complete("tell me", request_id="r-1", **DIALOGUE)
        assert (again.text, again.end) == (first.text, first.end)
    assert len(engine.requests) == 1


async def test_a_repeat_at_another_place_is_pointed_to_the_first_one() -> None:
    other = 1 - murmur2_partition(b"r-1", NUM_PARTITIONS)
    engine = FakeEngine(TEXT)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(engine)
        await client.complete("tell me", request_id="r-1", **DIALOGUE)
        headers = [("request_id", "r-1"), ("reply_partition", str(other))]
        await send_raw(gea, pack(GenerationRequest(prompt="tell me")), headers)
        await gea.broker.until(lambda: any(r.kind is Kind.SEE for r in gea.tokens_of("r-1")))
        (see,) = (record for record in gea.tokens_of("r-1") if record.kind is Kind.SEE)
        assert see.see is not None
        assert (see.see.topic, see.see.partition) == (TOKENS, 1 - other)
    assert len(engine.requests) == 1


async def test_a_bad_repeat_does_not_end_the_stream_that_runs() -> None:
    gate = Gate(stop_at=10)
    async with installation() as gea, gea.client() as client:
        asking = await answering(gea, client, gate)
        await send_raw(gea, msgpack.packb({"prompt": "x", "max_tokens": 0}), [("request_id", "r-1")])
        await send_raw(gea, b"\xc1", [("request_id", "r-1")])
        gea.store.down = True
        await send_raw(gea, msgpack.packb({"prompt": ""}), [("request_id", "r-1")])
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        gate.opened.set()
        assert (await asking).text == TEXT


async def test_another_tenants_request_id_gives_nothing_away() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(TEXT))
        await client.complete("tell me", request_id="r-1", **DIALOGUE)
        headers = [("request_id", "r-1"), ("tenant", "other")]
        await send_raw(gea, pack(GenerationRequest(prompt="tell me")), headers)
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        assert [letter.code for letter in dead_letters(gea)] == ["invalid_request"]
        assert not any(record.kind is Kind.SEE for record in gea.tokens_of("r-1"))


@pytest.mark.parametrize("value", [None, b"", b"\xc1", b"not msgpack", msgpack.packb([1]), msgpack.packb(7)])
async def test_undecodable_bytes_are_dead_lettered_end_the_request_and_block_nobody(value: bytes | None) -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(TEXT))
        await send_raw(gea, value, [("request_id", "bad-1")])
        await send_raw(gea, value)
        end = await end_of(gea, client, "bad-1")
        assert end.failure is not None
        assert (end.status, end.failure.code) == (EndStatus.FAILED, "undecodable")
        assert (await client.complete("tell me", **DIALOGUE)).text == TEXT
        letters = dead_letters(gea)
        assert [letter.code for letter in letters] == ["undecodable", "invalid_request"]
        assert [letter.value for letter in letters] == [value, value]
        assert {letter.topic for letter in letters} == {REQUESTS}
        await all_committed(gea, REQUESTS, Pool.ROUTER)


@pytest.mark.parametrize(
    ("body", "headers", "code", "field"),
    [
        ({"prompt": ""}, {}, "invalid_request", "prompt"),
        ({"prompt": "x" * 300_000}, {}, "invalid_request", "prompt"),
        ({"prompt": "x" * 1_000_000}, {}, "invalid_request", "body"),
        ({"prompt": ["x"]}, {}, "invalid_request", "prompt"),
        ({"prompt": "x", "temperature": 2.1}, {}, "invalid_request", "temperature"),
        ({"prompt": "x", "session_id": "a b"}, {}, "invalid_request", "session_id"),
        ({"prompt": "x"}, {"deadline_ms": "1"}, "deadline_exceeded", "deadline_ms"),
        ({"prompt": "x"}, {"deadline_ms": "soon"}, "invalid_request", "deadline_ms"),
        ({"prompt": "x"}, {"reply_partition": "99"}, "invalid_request", "reply_partition"),
        ({"prompt": "x"}, {"reply_topic": "gea.requests"}, "invalid_request", "reply_topic"),
        ({"prompt": "x"}, {"tenant": "a b"}, "invalid_request", "tenant"),
        ({"prompt": "x"}, {"ce_type": "gea.request.v2"}, "unsupported_version", "ce_type"),
        ({"prompt": "x"}, {"content-type": "text/plain"}, "invalid_request", "content-type"),
    ],
)
async def test_a_bad_request_ends_with_the_name_of_its_field(
    body: dict[str, object], headers: dict[str, str], code: str, field: str
) -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start(Pool.ROUTER, "router-1")
        await send_raw(gea, msgpack.packb(body), [("request_id", "bad-1"), *headers.items()])
        end = await end_of(gea, client, "bad-1")
        assert end.failure is not None
        assert (end.status, end.finish_reason) == (EndStatus.FAILED, FinishReason.ERROR)
        assert (end.failure.code, end.failure.field) == (code, field)
        assert field in end.failure.message
        assert dead_letters(gea) == []


@pytest.mark.parametrize("request_id", ["", "a b", "x" * 129, "\x00"])
async def test_a_malformed_request_id_is_dead_lettered(request_id: str) -> None:
    async with installation() as gea:
        await gea.start(Pool.ROUTER, "router-1")
        await send_raw(gea, pack(GenerationRequest(prompt="x")), [("request_id", request_id)])
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        assert [letter.code for letter in dead_letters(gea)] == ["invalid_request"]
        assert gea.broker.records(TOKENS) == []


async def test_rubbish_between_the_pools_is_dead_lettered_and_blocks_nobody() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(TEXT))
        producer = await gea.broker.producer()
        for pool in (Pool.INTENT, Pool.RETRIEVAL, Pool.GENERATION):
            for partition in range(NUM_PARTITIONS):
                await producer.send(pool_topic(pool, "blue"), b"\xc1", partition=partition)
        assert (await client.complete("tell me")).end.status is EndStatus.COMPLETED
        await gea.broker.until(lambda: len(gea.broker.records(DEAD_LETTER)) == 3 * NUM_PARTITIONS)
        assert {letter.code for letter in dead_letters(gea)} == {"undecodable"}


async def test_load_above_the_limit_is_rejected_with_a_time_and_may_come_again_under_its_id() -> None:
    gate = Gate(stop_at=1)
    async with installation() as gea, gea.client() as client:
        gea.limits = replace(gea.limits, max_queue_depth=1)
        await gea.start_all(FakeEngine(TEXT, pause=gate))
        first = asyncio.create_task(client.complete("tell me", **DIALOGUE))
        await gate.reached.wait()
        router = gea.workers["router-1"].handler
        directory = router._directory  # type: ignore[attr-defined]

        def is_seen() -> bool:
            return load_of(directory.workers(Pool.GENERATION)).num_requests > 0

        assert await directory.wait_until(is_seen, timeout_s=10)
        with pytest.raises(RequestFailedError) as caught:
            await client.complete("me too", request_id="r-2", **DIALOGUE)
        assert caught.value.failure_code == "overloaded"
        end = await end_of(gea, client, "r-2")
        assert end.failure is not None
        assert (end.failure.retry_after_s or 0) > 0
        gate.opened.set()
        await first
        assert await directory.wait_until(lambda: not is_seen(), timeout_s=10)
        assert (await client.complete("me too", request_id="r-2", **DIALOGUE)).text == TEXT


async def test_a_broker_that_is_away_is_named_in_bounded_time() -> None:
    async with installation() as gea, gea.client() as client:
        gea.broker.down = True
        started = time.monotonic()
        with pytest.raises(BrokerUnavailableError, match="in-memory broker cannot be reached"):
            await client.complete("tell me")
        assert time.monotonic() - started < 5


async def test_work_goes_on_when_the_broker_comes_back() -> None:
    gate = Gate(stop_at=10)
    async with installation() as gea, gea.client() as client:
        asking = await answering(gea, client, gate)
        gea.broker.down = True
        gate.opened.set()
        await gate.passed.wait()
        gea.broker.down = False
        answer = await asking
        assert answer.text == TEXT
        assert view_of(gea, "r-1").end == answer.end
