"""Heartbeats and the directory that reads them."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from schemas.codec import pack, unpack
from schemas.errors import BrokerUnavailableError
from schemas.worker import Pool, WorkerState, WorkerStatus
from streams.broker import Record
from streams.directory import Directory, Heartbeat, Roster
from streams.memory import MemoryBroker
from streams.topics import WORKERS
from tests.fakes import FakeClock
from tests.streams.token_fakes import broker_with_topics, until

CLOCK_MS = 1_000_000


def status(worker_id: str, pool: Pool = Pool.GENERATION, **changes: object) -> WorkerStatus:
    made = WorkerStatus(worker_id=worker_id, pool=pool, colour="blue", state=WorkerState.READY, updated_ms=CLOCK_MS)
    return msgspec.structs.replace(made, **changes)


def record(status: WorkerStatus | None, worker_id: str = "w", value: bytes | None = None) -> Record:
    value = pack(status) if status is not None else value
    key = (status.worker_id if status is not None else worker_id).encode()
    return Record(topic=WORKERS, partition=0, offset=0, timestamp_ms=0, key=key, value=value)


def test_workers_are_found_by_pool_colour_and_state() -> None:
    roster = Roster(clock_ms=FakeClock(CLOCK_MS))
    for each in (
        status("a"),
        status("b", colour="green"),
        status("c", Pool.INTENT),
        status("d", state=WorkerState.STARTING),
    ):
        roster.apply(record(each), is_live=True)
    assert [w.worker_id for w in roster.workers()] == ["a", "b", "c", "d"]
    assert [w.worker_id for w in roster.workers(Pool.GENERATION, "blue", WorkerState.READY)] == ["a"]


def test_a_silent_worker_is_gone_and_one_that_speaks_again_is_back() -> None:
    clock = FakeClock(CLOCK_MS)
    roster = Roster(max_age_s=5, clock_ms=clock)
    roster.apply(record(status("a")), is_live=True)
    clock.advance(5_000)
    assert len(roster.workers()) == 1
    clock.advance(1)
    assert roster.workers() == ()
    roster.apply(record(status("a")), is_live=True)
    assert len(roster.workers()) == 1


def test_a_worker_whose_clock_is_wrong_lives_while_it_speaks() -> None:
    roster = Roster(clock_ms=FakeClock(CLOCK_MS))
    roster.apply(record(status("a", updated_ms=0)), is_live=True)
    roster.apply(record(status("b", updated_ms=0)), is_live=False)
    assert [w.worker_id for w in roster.workers()] == ["a"]


def test_a_tombstone_removes_and_rubbish_is_counted() -> None:
    roster = Roster(clock_ms=FakeClock(CLOCK_MS))
    roster.apply(record(status("a")), is_live=True)
    roster.apply(record(None, "a"), is_live=True)
    roster.apply(record(None, "x", value=b"\xc1"), is_live=True)
    assert (roster.workers(), roster.num_undecodable) == ((), 1)


async def test_a_heartbeat_is_seen_by_a_directory_and_leaves_a_tombstone() -> None:
    broker = await broker_with_topics()
    clock = FakeClock(CLOCK_MS)
    state = WorkerState.STARTING
    heartbeat = Heartbeat(await broker.producer(), lambda: status("a", state=state), interval_s=60)
    async with Directory(broker, clock_ms=clock) as directory:
        async with heartbeat:
            assert await directory.wait_until(lambda: bool(directory.workers(state=None)), timeout_s=5)
            assert directory.workers() == ()
            state = WorkerState.READY
            heartbeat.beat()
            assert await directory.wait_until(lambda: bool(directory.workers(Pool.GENERATION)), timeout_s=5)
        assert await directory.wait_until(lambda: not directory.workers(state=None), timeout_s=5)
    assert broker.records(WORKERS)[-1].value is None


async def test_a_heartbeat_goes_on_by_itself_and_over_a_lost_broker() -> None:
    broker = await broker_with_topics()
    broker_down = Heartbeat(await broker.producer(), lambda: status("a"), interval_s=0.001)
    broker.down = True
    async with broker_down:
        await until(lambda: broker_down.num_lost > 0)
        broker.down = False
        await broker.until(lambda: len(broker.records(WORKERS)) >= 3)
        assert broker_down.num_lost == 0
        await broker_down.stop()
        await broker_down.stop()
    values = [each.value for each in broker.records(WORKERS)]
    assert values[-1] is None
    assert unpack(values[0], WorkerStatus).worker_id == "a"


async def test_a_directory_reads_what_was_written_before_and_outlives_a_lost_broker() -> None:
    broker = await broker_with_topics()
    append(broker, "a")
    async with Directory(broker, clock_ms=FakeClock(CLOCK_MS)) as directory:
        assert [w.worker_id for w in directory.workers()] == ["a"]
        broker.down = True
        await until(lambda: not directory.is_reading)
        broker.down = False
        append(broker, "b")
        assert await directory.wait_until(lambda: len(directory.workers()) == 2, timeout_s=5)
    assert len(asyncio.all_tasks()) == 1


def append(broker: MemoryBroker, worker_id: str) -> None:
    broker.append(WORKERS, pack(status(worker_id)), worker_id.encode(), (), None)


async def test_a_directory_without_its_topic_says_so() -> None:
    with pytest.raises(BrokerUnavailableError):
        async with Directory(MemoryBroker()):
            pass


async def test_waiting_for_workers_ends_in_time() -> None:
    broker = await broker_with_topics()
    async with Directory(broker) as directory:
        assert not await directory.wait_until(lambda: bool(directory.workers()), timeout_s=0.01)
