"""Several records of one request at once: a partition that goes and comes back, a re-produced request, repeats."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from schemas.codec import pack, unpack
from schemas.envelope import HOP, Headers, RoutedRequest
from schemas.request import GenerationRequest
from schemas.tokens import Epoch, Kind
from schemas.worker import Pool
from streams.answer import Answer
from streams.broker import Producer, Record
from streams.cancellations import Cancellations
from streams.client import GeaClient
from streams.delivery import Delivery, Ownership
from streams.routing import murmur2_partition
from streams.token_reader import decode_token
from streams.topics import DEAD_LETTER, REQUESTS, TOKENS, pool_group, pool_topic
from tests.flow.harness import DIALOGUE, NUM_PARTITIONS, Installation, installation
from tests.flow.holds import TEXT, Gate, answering
from tests.flow.records import REPLY, all_committed, claimed_by_another, dead_letters, send_again, send_raw, view_of
from tests.streams.token_fakes import until
from workers.generation.engine.fake import FakeEngine
from workers.generation.stage import GenerationHandler
from workers.outbox import Outbox

TOPIC = pool_topic(Pool.GENERATION, "blue")
GROUP = pool_group(Pool.GENERATION, "blue")


class LateAcknowledgement:
    """Writes at once; what goes to `topic` is acknowledged only when `is_seen` holds."""

    def __init__(self, inner: Producer, topic: str) -> None:
        self.is_seen = asyncio.Event()
        self.written = asyncio.Event()
        self._inner = inner
        self._topic = topic

    async def send(self, topic: str, value: bytes | None, **place: Any) -> Record:
        record = await self._inner.send(topic, value, **place)
        if topic == self._topic:
            self.written.set()
            await self.is_seen.wait()
        return record

    async def close(self) -> None:
        await self._inner.close()


def generation(gea: Installation) -> GenerationHandler:
    handler = gea.workers["generation-1"].handler
    assert isinstance(handler, GenerationHandler)
    return handler


async def another_router(gea: Installation) -> None:
    """Change to a router that has not seen the request itself."""
    await gea.stop("router-1")
    await gea.start(Pool.ROUTER, "router-2")


async def test_a_partition_that_was_lost_and_comes_back_to_the_same_worker_is_worked_on() -> None:
    gate = Gate(stop_at=20)
    async with installation() as gea, gea.client() as client:
        asking = await answering(gea, client, gate)
        gea.broker.group(GROUP).generation += 1  # the group went through a generation without us
        await gea.broker.rebalance(GROUP)
        gate.opened.set()
        assert (await asking).text == TEXT
        await all_committed(gea, TOPIC, Pool.GENERATION)


async def test_a_request_that_comes_back_before_its_handing_on_is_acknowledged_is_not_swallowed() -> None:
    gate = Gate(stop_at=10)
    async with installation() as gea, gea.client() as client:
        asking = await answering(gea, client, gate)
        outbox = generation(gea)._outbox
        late = LateAcknowledgement(outbox.producer, TOPIC)
        outbox.producer = late
        gea.broker.down = True
        gate.opened.set()
        await gate.passed.wait()
        await until(lambda: not generation(gea)._running)
        gea.broker.down = False
        await late.written.wait()
        assert (await asking).text == TEXT  # by the second record, while the first still waits
        late.is_seen.set()
        await all_committed(gea, TOPIC, Pool.GENERATION)


async def test_without_the_store_a_repeat_elsewhere_is_pointed_to_the_stream_that_runs() -> None:
    other = 1 - murmur2_partition(b"r-1", NUM_PARTITIONS)
    gate = Gate(stop_at=10)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(TEXT, pause=gate))
        gea.store.down = True
        asking = asyncio.create_task(client.complete("tell me", request_id="r-1", **DIALOGUE))
        await gate.reached.wait()
        await another_router(gea)
        body = pack(GenerationRequest(prompt="tell me", session_id="another-1", **DIALOGUE))
        await send_raw(gea, body, [("request_id", "r-1"), ("reply_partition", str(other))])
        await gea.broker.until(lambda: len(gea.broker.records(TOPIC)) == 2)
        gate.opened.set()
        assert (await asking).text == TEXT
        await gea.broker.until(lambda: any(record.kind is Kind.SEE for record in gea.tokens_of("r-1")))
        await all_committed(gea, TOPIC, Pool.GENERATION)
        (see,) = (record.see for record in gea.tokens_of("r-1") if record.kind is Kind.SEE)
        assert see is not None
        assert (see.topic, see.partition) == (TOKENS, 1 - other)


async def test_without_the_store_another_tenants_repeat_gets_nothing_of_the_stream_that_runs() -> None:
    gate = Gate(stop_at=10)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(TEXT, pause=gate))
        gea.store.down = True
        asking = asyncio.create_task(client.complete("tell me", request_id="r-1", **DIALOGUE))
        await gate.reached.wait()
        await another_router(gea)
        body = pack(GenerationRequest(prompt="tell me", **DIALOGUE))
        await send_raw(gea, body, [("request_id", "r-1"), ("tenant", "other")])
        await gea.broker.until(lambda: len(gea.broker.records(TOPIC)) == 2)
        gate.opened.set()
        assert (await asking).text == TEXT
        await all_committed(gea, TOPIC, Pool.GENERATION)
        assert [letter.code for letter in dead_letters(gea)] == ["invalid_request"]
        assert not any(record.kind is Kind.SEE for record in gea.tokens_of("r-1"))


@pytest.mark.parametrize("is_store_down", [False, True])
async def test_another_tenants_repeat_ends_where_its_own_readers_stand(is_store_down: bool) -> None:
    other = 1 - murmur2_partition(b"r-1", NUM_PARTITIONS)
    gate = Gate(stop_at=10)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(TEXT, pause=gate))
        gea.store.down = is_store_down
        asking = asyncio.create_task(client.complete("tell me", request_id="r-1", **DIALOGUE))
        await gate.reached.wait()
        await another_router(gea)
        body = pack(GenerationRequest(prompt="tell me", **DIALOGUE))
        await send_raw(gea, body, [("request_id", "r-1"), ("tenant", "other"), ("reply_partition", str(other))])
        await gea.broker.until(lambda: len(gea.broker.records(TOPIC if is_store_down else DEAD_LETTER)) > is_store_down)
        gate.opened.set()
        assert (await asking).text == TEXT
        await all_committed(gea, TOPIC, Pool.GENERATION)
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        ends = [record.end for record in map(decode_token, gea.broker.records(TOKENS)) if record.end is not None]
        (failure,) = (end.failure for end in ends if end.failure is not None)
        assert failure.field == "request_id"
        assert view_of(gea, "r-1").is_ended


async def test_a_copy_is_not_acknowledged_on_the_word_of_a_run_that_wrote_its_end_in_vain() -> None:
    gate = Gate(stop_at=10)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(TEXT, pause=gate))
        await claimed_by_another(gea, Epoch(0, 99))  # it has died
        asking = asyncio.create_task(client.complete("tell me", request_id="r-1", **DIALOGUE))
        await gate.reached.wait()  # its claim does not count, and it does not know
        await send_again(gea, TOPIC)
        await until(lambda: gea.num_held("generation-1", "r-1") == 2)
        gate.opened.set()
        await asking
        await all_committed(gea, TOPIC, Pool.GENERATION)
        view = view_of(gea, "r-1")
        assert (view.is_ended, view.text()) == (True, TEXT)


async def cut_off(gea: Installation, client: GeaClient) -> tuple[asyncio.Task[Answer], Record]:
    """Let a worker die in mid-answer; whoever waits for another run after that waits too long."""
    gea.lease_s = 3_600
    asking = await answering(gea, client, Gate(stop_at=20))
    await gea.kill("generation-1")
    (record,) = gea.broker.records(TOPIC)
    assert unpack(record.value, RoutedRequest).reply == REPLY  # where `claimed_by_another` writes
    return asking, record


async def test_a_record_that_was_handed_on_does_not_wait_for_the_one_that_waits_for_it() -> None:
    """Both records of a request come back after a crash; only the one with the higher hop can outrank what is there."""
    async with installation() as gea, gea.client() as client:
        asking, first = await cut_off(gea, client)
        producer = await gea.broker.producer()
        handed_on = msgspec.structs.replace(unpack(first.value, RoutedRequest), hop=1)
        await producer.send(
            TOPIC, pack(handed_on), key=first.key, headers=with_hop(first.headers, 1), partition=first.partition
        )
        await claimed_by_another(gea, Epoch(1, 1))
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(TEXT))
        assert (await asking).text == TEXT
        await all_committed(gea, TOPIC, Pool.GENERATION)
    assert [record.kind for record in gea.tokens_of("r-1")].count(Kind.END) == 1


async def test_a_record_that_was_forwarded_twice_does_not_wait_for_itself() -> None:
    """Two records of one request lie in two partitions; the one that cannot outrank what is there came first."""
    async with installation() as gea, gea.client() as client:
        asking, record = await cut_off(gea, client)
        producer = await gea.broker.producer()
        await claimed_by_another(gea, Epoch(0, 5))
        outbox = Outbox(producer, worker_id="by-hand", num_token_partitions=NUM_PARTITIONS)
        handler = gea._handler(Pool.GENERATION, outbox, FakeEngine(TEXT), Cancellations())
        await handler.start()
        (older, is_older_done), (newer, is_newer_done) = (delivered(record, generation=n) for n in (4, 6))
        handling = asyncio.create_task(handler.handle([older]))
        await gea.broker.until(lambda: any(each.epoch == Epoch(0, 4) for each in gea.tokens_of("r-1")))
        await handler.handle([newer])
        await handling
        assert (await asking).text == TEXT
        assert is_older_done.is_set()
        assert is_newer_done.is_set()
        await handler.stop()


def delivered(record: Record, *, generation: int) -> tuple[Delivery, asyncio.Event]:
    """Return a record that was there when its partition became ours, and what is set when it is acknowledged."""
    is_done = asyncio.Event()
    ownership = Ownership(generation, record.offset + 1, lambda: True)
    ownership.tracker.start(record.offset)
    return Delivery(record, ownership, 0.0, lambda _: is_done.set()), is_done


def with_hop(headers: Headers, hop: int) -> Headers:
    return (*((name, value) for name, value in headers if name != HOP), (HOP, str(hop).encode()))


async def test_a_copy_that_comes_after_the_end_costs_no_generation() -> None:
    async with installation() as gea, gea.client() as client:
        engine = FakeEngine("Within 30 days.")
        await gea.start_all(engine)
        first = await client.complete("How long?", request_id="r-1", **DIALOGUE)
        await send_again(gea, TOPIC)
        await gea.broker.until(lambda: Kind.CLAIM in [token.kind for token in gea.tokens_of("r-1")])
        assert view_of(gea, "r-1").end == first.end
        assert len(engine.requests) == 1
