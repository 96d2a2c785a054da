"""The in-memory broker: the contract, and what only it can do."""

from __future__ import annotations

import pytest

from schemas.errors import BrokerUnavailableError, StreamExpiredError
from streams.broker import Broker, TopicPartition
from streams.memory import MemoryBroker
from tests.fakes import FakeClock
from tests.streams.contract import BrokerContract
from tests.streams.contract_steps import Watch, create, join, produce, read
from tests.streams.contract_steps import topic as topic


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


class TestMemoryBroker(BrokerContract):
    """The contract in memory."""


async def test_it_satisfies_the_protocol(broker: MemoryBroker) -> None:
    checked: Broker = broker
    async with checked as opened:
        assert opened.name == "in-memory broker"


async def test_timestamps_come_from_the_given_clock() -> None:
    clock = FakeClock(1_000)
    broker = MemoryBroker(clock)
    await create(broker, "t")
    (first,) = await produce(broker, "t", 1)
    clock.advance(5)
    (second,) = await produce(broker, "t", 1)
    assert (first.timestamp_ms, second.timestamp_ms) == (1_000, 1_005)


async def test_a_killed_member_is_told_nothing_and_commits_nothing(broker: MemoryBroker) -> None:
    (place,) = await create(broker, "t")
    await produce(broker, "t", 2)
    dead, heir = Watch(), Watch()
    zombie = await join(broker, "t", "g", dead, "a")
    await read(zombie, 2)
    await broker.kill("a")
    assert dead.revoked == []
    assert not await zombie.commit({place: 2})
    assert list(await zombie.poll(timeout_ms=5, max_records=1)) == []
    member = await join(broker, "t", "g", heir, "b")
    assert [record.offset for record in await read(member, 2)] == [0, 1]


async def test_a_commit_of_a_passed_generation_is_refused(broker: MemoryBroker) -> None:
    (place,) = await create(broker, "t")
    member = await join(broker, "t", "g", Watch())
    broker.group("g").generation += 1
    assert not await member.commit({place: 1})
    assert broker.committed("g", place) is None


async def test_pause_is_lost_at_a_rebalance(broker: MemoryBroker) -> None:
    (place,) = await create(broker, "t")
    await produce(broker, "t", 1)
    member = await join(broker, "t", "g", Watch())
    member.pause(frozenset({place}))
    assert list(await member.poll(timeout_ms=5, max_records=1)) == []
    await broker.rebalance("g")
    assert len(await read(member, 1)) == 1


async def test_compaction_keeps_the_last_record_of_each_key_and_its_offset(broker: MemoryBroker) -> None:
    (place,) = await create(broker, "t")
    for _ in range(3):
        await produce(broker, "t", 2)
    broker.compact("t")
    reader = await broker.reader({place: 0})
    assert [record.offset for record in await read(reader, 2)] == [4, 5]
    assert await reader.end_offsets() == {place: 6}


async def test_a_reader_at_an_expired_offset_is_told(broker: MemoryBroker) -> None:
    (place,) = await create(broker, "t")
    await produce(broker, "t", 5)
    reader = await broker.reader({place: 0})
    broker.expire("t", 0, 3)
    with pytest.raises(StreamExpiredError):
        await reader.poll(timeout_ms=5)
    assert await reader.begin_offsets() == {place: 3}
    reader.seek(place, 3)
    assert [record.offset for record in await read(reader, 2)] == [3, 4]


async def test_a_group_goes_on_at_the_first_retained_record(broker: MemoryBroker) -> None:
    await create(broker, "t")
    await produce(broker, "t", 5)
    member = await join(broker, "t", "g", Watch())
    broker.expire("t", 0, 3)
    assert [record.offset for record in await read(member, 2)] == [3, 4]


async def test_everything_fails_while_the_broker_is_down_and_works_again_after(broker: MemoryBroker) -> None:
    (place,) = await create(broker, "t")
    producer = await broker.producer()
    member = await join(broker, "t", "g", Watch())
    reader = await broker.reader({place: 0})
    broker.down = True
    for call in (
        lambda: producer.send("t", b"x"),
        lambda: member.poll(timeout_ms=5, max_records=1),
        lambda: member.commit({place: 1}),
        lambda: reader.poll(timeout_ms=5),
        lambda: broker.partitions("t"),
        lambda: broker.producer(),
    ):
        with pytest.raises(BrokerUnavailableError):
            await call()
    broker.down = False
    await producer.send("t", b"x")
    assert len(await read(reader, 1)) == 1


async def test_a_topic_that_does_not_exist_is_unavailable(broker: MemoryBroker) -> None:
    with pytest.raises(BrokerUnavailableError):
        await broker.reader({TopicPartition("missing", 0): 0})
