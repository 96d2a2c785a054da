"""Retries wait until they are due and return to their pool; nothing else leaves a retry topic."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from schemas.codec import pack
from schemas.envelope import NOT_BEFORE_MS, TARGET, Headers, RoutedRequest, header
from schemas.request import GenerationRequest
from schemas.tokens import EndStatus
from streams.broker import Producer, Record, TopicPartition
from streams.routing import murmur2_partition
from streams.topics import RETRY_LONG, RETRY_SHORT, retry_group
from tests.workers.routed import ROUTED
from tests.workers.router.retry_post import GENERATION, post, running


async def test_a_retry_returns_to_its_pool_when_it_is_due_and_not_before() -> None:
    async with post() as here, running(here.mover()) as mover:
        await here.retry("r-1", 5_000, hop=2, attempt=1)
        await here.until_waiting(mover, 1)
        here.clock.step(4_999)
        await here.retry("r-2", 0)
        await here.until_returned("r-2")
        here.clock.step(1)
        await here.until_returned("r-1", "r-2")
        await here.until_committed()
        (record,) = [r for r in here.broker.records(GENERATION) if header(r.headers, "request_id") == "r-1"]
        assert record.key == b"s-1"  # where its session's turns go
        assert record.value == next(r.value for r in here.broker.records(RETRY_SHORT) if r.key == b"r-1")
        assert header(record.headers, "hop") == "3"
        assert header(record.headers, TARGET) is header(record.headers, NOT_BEFORE_MS) is None


async def test_a_long_delay_does_not_stand_before_a_short_one() -> None:
    async with post() as here, running(here.mover(max_in_flight=1)) as mover:
        await here.retry("long", 60_000, RETRY_LONG)
        await here.until_waiting(mover, 1)
        await here.retry("short", 5_000)
        await here.until_waiting(mover, 2)
        here.clock.step(5_000)
        await here.until_returned("short")
        here.clock.step(55_000)
        await here.until_returned("long", "short")


async def test_at_most_so_many_wait_here_and_the_others_follow() -> None:
    async with post() as here, running(here.mover(max_in_flight=3)) as mover:
        for number in range(10):
            await here.retry(f"r-{number}", 5_000)
        await here.until_waiting(mover, 3)
        for _ in range(200):
            await asyncio.sleep(0)
        assert mover.num_waiting == 3
        here.clock.step(5_000)
        await here.until_returned(*(f"r-{number}" for number in range(10)))
        await here.until_committed()


async def test_a_request_that_was_cancelled_or_is_late_returns_at_once_to_be_ended_by_its_pool() -> None:
    async with post() as here, running(here.mover()) as mover:
        await here.retry("cancelled", 5_000)
        await here.retry("late", 5_000, deadline_ms=here.clock.now_ms() + 1_000)
        await here.retry("waits", 5_000)
        await here.until_waiting(mover, 3)
        here.cancellations.cancel("cancelled", "default")
        await here.until_returned("cancelled")
        here.clock.step(1_000)
        await here.until_returned("cancelled", "late")
        assert mover.num_waiting == 1


async def test_a_request_whose_reader_is_gone_returns_at_once_to_be_ended_by_its_pool() -> None:
    async with post() as here, running(here.mover()) as mover:
        here.cancellations.leases.hear(True)
        leased = msgspec.structs.replace(ROUTED.request, reader_lease_s=1.0)
        await here.retry("left", 5_000, request=leased)
        await here.until_waiting(mover, 1)
        here.clock.step(1_000)
        here.cancellations.leases.check()
        await here.until_returned("left")


async def test_no_record_waits_longer_than_its_topic_says() -> None:
    async with post() as here, running(here.mover()) as mover:
        await here.retry("r-1", 10**12)
        await here.until_waiting(mover, 1)
        here.clock.step(6_000)
        await here.until_returned("r-1")


async def test_a_mover_that_stops_leaves_what_waits_to_the_next_one() -> None:
    async with post() as here:
        async with running(here.mover()) as mover:
            await here.retry("now", 0)
            await here.retry("later", 5_000)
            await here.until_returned("now")
            await here.until_waiting(mover, 1)
        async with running(here.mover("router-2")) as mover:
            await here.until_waiting(mover, 1)
            here.clock.step(5_000)
            await here.until_returned("later", "now")
            await here.until_committed()


async def test_a_mover_that_dies_before_its_commit_moves_twice_rather_than_never() -> None:
    async with post() as here:
        first = here.mover()
        await first.start()
        await here.retry("r-1", 5_000)
        await here.until_waiting(first, 1)
        await here.broker.kill("router-1")
        async with running(here.mover("router-2")) as second:
            await here.until_waiting(second, 1)
            here.clock.step(5_000)
            await here.until_returned("r-1", "r-1")  # both: the first does not know yet that it is dead
            await here.until_committed()
        await first.stop()


class Gated:
    """A producer whose acknowledgements for the key `held` wait for `opened`."""

    def __init__(self, inner: Producer, held: bytes = b"s-1") -> None:
        self.inner = inner
        self.held = held
        self.asked = asyncio.Event()
        self.opened = asyncio.Event()

    async def send(self, topic: str, value: bytes | None, **place: Any) -> Record:
        if place.get("key") == self.held:
            self.asked.set()
            await self.opened.wait()
        return await self.inner.send(topic, value, **place)

    async def close(self) -> None:
        await self.inner.close()


async def test_a_record_is_acknowledged_only_after_its_copy_is() -> None:
    async with post() as here:
        await here.retry("r-1", 0)
        gate = Gated(here.outbox.producer)
        here.outbox.producer = gate
        held = TopicPartition(RETRY_SHORT, murmur2_partition(b"r-1", 2))
        other = next(name for name in ("r-2", "r-3", "r-4") if murmur2_partition(name.encode(), 2) != held.partition)
        async with running(here.mover()):
            await gate.asked.wait()
            await here.retry(other, 0, request=GenerationRequest(prompt="x", session_id="s-2"))
            beside = TopicPartition(RETRY_SHORT, 1 - held.partition)
            async with asyncio.timeout(5):
                await here.broker.until(lambda: here.broker.committed(retry_group(RETRY_SHORT), beside) == 1)
            assert here.broker.committed(retry_group(RETRY_SHORT), held) is None
            gate.opened.set()
            await here.until_returned("r-1", other)
            await here.until_committed()


async def test_what_is_being_moved_at_the_stop_is_finished() -> None:
    async with post() as here:
        await here.retry("r-1", 0)
        gate = Gated(here.outbox.producer)
        here.outbox.producer = gate
        mover = here.mover()
        await mover.start()
        await gate.asked.wait()
        stopping = asyncio.create_task(mover.stop())
        gate.opened.set()
        await stopping
        assert here.returned() == ["r-1"]
        await here.until_committed()


async def test_a_broker_that_was_away_is_waited_for() -> None:
    async with post() as here, running(here.mover()) as mover:
        await here.retry("r-1", 5_000)
        await here.until_waiting(mover, 1)
        here.broker.down = True
        here.clock.step(5_000)
        await asyncio.sleep(0)
        here.broker.down = False
        await here.until_returned("r-1")


BODY = pack(ROUTED)
DUE = (NOT_BEFORE_MS, b"1")


@pytest.mark.parametrize(
    ("value", "order", "code"),
    [
        (None, ((TARGET, GENERATION.encode()), DUE), "undecodable"),
        (b"\xc1", ((TARGET, GENERATION.encode()), DUE), "undecodable"),
        (BODY, (DUE,), "invalid_request"),
        (BODY, ((TARGET, GENERATION.encode()),), "invalid_request"),
        (BODY, ((TARGET, b"gea.requests"), DUE), "invalid_request"),
        (BODY, ((TARGET, b"gea.tokens"), DUE), "invalid_request"),
        (BODY, ((TARGET, b"gea.retry.5s"), DUE), "invalid_request"),
        (BODY, ((TARGET, b"gea.generation.nowhere"), DUE), "invalid_request"),
        (BODY, ((TARGET, b"\xff"), DUE), "invalid_request"),
        (BODY, ((TARGET, GENERATION.encode()), (NOT_BEFORE_MS, b"soon")), "invalid_request"),
    ],
)
async def test_what_cannot_return_is_put_aside_and_ends_its_request(
    value: bytes | None, order: Headers, code: str
) -> None:
    async with post() as here, running(here.mover()):
        await here.raw(value, (("request_id", b"r-1"), *order))
        await here.until_committed()
        assert [letter.code for letter in here.letters()] == [code]
        assert here.letters()[0].value == value
        ((status, failure, _),) = here.ends("r-1")
        assert (status, failure) == (EndStatus.FAILED, code)
        assert here.returned() == []
        await here.retry("good", 0)
        await here.until_returned("good")


async def test_the_end_of_what_was_put_aside_outranks_the_run_that_failed() -> None:
    async with post() as here, running(here.mover()):
        again = pack(msgspec.structs.replace(ROUTED, hop=3))
        await here.raw(again, (("request_id", b"r-1"), (TARGET, b"gea.requests"), DUE))
        await here.until_committed()
        ((_, _, epoch),) = here.ends("r-1")
        assert epoch.hop == 3


async def test_placement_chooses_the_partition_of_the_target() -> None:
    class Last:
        def partition(self, topic: str, routed: RoutedRequest) -> int | None:
            return 1 - murmur2_partition(b"s-1", 2)

    async with post() as here:
        here.outbox.placement = Last()
        async with running(here.mover()):
            await here.retry("r-1", 0)
            await here.until_returned("r-1")
            record: Record = here.broker.records(GENERATION)[0]
            assert record.partition == 1 - murmur2_partition(b"s-1", 2)
