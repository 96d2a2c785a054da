"""What every broker must do: the same checks run on the in-memory broker and on Kafka.

A test file makes a subclass whose name begins with Test, with a fixture `broker`; `topic` is a fresh name per test.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from uuid import uuid4

import pytest

from schemas.errors import InvalidRequestError, StreamExpiredError
from streams.assignor import assign
from streams.broker import Assignment, Broker, GroupConsumer, LogReader, Record, TopicPartition, TopicSpec
from streams.consumer import Delivery, PoolConsumer
from streams.routing import murmur2_partition
from streams.settings import ConsumerLimits

PATIENCE_S = 40.0
QUICK = ConsumerLimits(batch_size=4, max_wait_ms=5, commit_interval_ms=50, poll_timeout_ms=100)


@pytest.fixture
def topic() -> str:
    return f"test-{uuid4().hex[:12]}"


async def create(broker: Broker, topic: str, num_partitions: int = 1, **settings: str) -> list[TopicPartition]:
    configs = tuple((name.replace("_", "."), value) for name, value in settings.items())
    assert await broker.create_topics([TopicSpec(name=topic, num_partitions=num_partitions, settings=configs)])
    return [TopicPartition(topic, number) for number in range(num_partitions)]


async def produce(broker: Broker, topic: str, count: int, *, partition: int | None = 0, start: int = 0) -> list[Record]:
    producer = await broker.producer()
    try:
        return [
            await producer.send(topic, b"%d" % n, key=b"key-%d" % n, partition=partition)
            for n in range(start, start + count)
        ]
    finally:
        await producer.close()


async def read(reader: LogReader | GroupConsumer, count: int, max_records: int = 100) -> list[Record]:
    records: list[Record] = []
    async with asyncio.timeout(PATIENCE_S):
        while len(records) < count:
            records.extend(await reader.poll(timeout_ms=200, max_records=max_records))
    return records


async def eventually(is_true: Callable[[], Awaitable[bool]], step: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not await is_true():
            await step()


class Watch:
    """Records the callbacks of one member."""

    def __init__(self) -> None:
        self.revoked: list[frozenset[TopicPartition]] = []
        self.assigned: list[Assignment] = []
        self.commit_at_revoke: Callable[[], Awaitable[bool]] | None = None
        self.results: list[bool] = []

    async def on_revoked(self, places: frozenset[TopicPartition]) -> None:
        self.revoked.append(places)
        if self.commit_at_revoke is not None:
            self.results.append(await self.commit_at_revoke())

    async def on_assigned(self, assignment: Assignment) -> None:
        self.assigned.append(assignment)


async def join(broker: Broker, topic: str, group: str, watch: Watch, member: str = "a") -> GroupConsumer:
    return await broker.group_consumer(
        [topic], group=group, member=member, on_revoked=watch.on_revoked, on_assigned=watch.on_assigned
    )


async def polling(*members: GroupConsumer) -> None:
    """Let every member poll once: a member that does not poll takes no part in a rebalance for ever."""
    await asyncio.gather(*(member.poll(timeout_ms=50, max_records=1) for member in members))


async def handle(pool: PoolConsumer, seen: list[tuple[int, int]]) -> None:
    async for batch in pool.batches():
        for delivery in batch:
            seen.append((delivery.record.partition, delivery.record.offset))
            delivery.done()


class BrokerContract:
    """The contract."""

    async def test_a_record_comes_back_as_it_was_sent(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        producer = await broker.producer()
        headers = (("request_id", b"r1"), ("twice", b"1"), ("twice", b"2"), ("empty", b""))
        sent = await producer.send(topic, b"\x00value\xff", key=b"key", headers=headers)
        tombstone = await producer.send(topic, None, key=b"key")
        await producer.close()
        reader = await broker.reader({place: 0})
        found = await read(reader, 2)
        await reader.close()
        assert found == [sent, tombstone]
        assert found[0].headers == headers
        assert found[1].value is None
        assert abs(found[1].timestamp_ms - found[0].timestamp_ms) < 60_000

    async def test_keys_go_where_murmur2_says(self, broker: Broker, topic: str) -> None:
        await create(broker, topic, 5)
        for record in await produce(broker, topic, 20, partition=None):
            assert record.key is not None
            assert record.partition == murmur2_partition(record.key, 5)

    async def test_order_and_offsets_are_dense_per_partition(self, broker: Broker, topic: str) -> None:
        places = await create(broker, topic, 2)
        for number in (0, 1):
            assert [r.offset for r in await produce(broker, topic, 10, partition=number)] == list(range(10))
        reader = await broker.reader(dict.fromkeys(places, 0))
        found = await read(reader, 20, max_records=3)
        assert all(reader.position(place) == 10 for place in places)
        await reader.close()
        for place in places:
            assert [record.offset for record in found if record.place == place] == list(range(10))

    async def test_sends_at_once_keep_their_order(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        producer = await broker.producer()
        await asyncio.gather(*(producer.send(topic, b"%d" % n, partition=0) for n in range(50)))
        await producer.close()
        reader = await broker.reader({place: 0})
        assert [record.value for record in await read(reader, 50)] == [b"%d" % n for n in range(50)]
        await reader.close()

    async def test_too_large_a_record_is_refused_and_the_next_one_goes_through(
        self, broker: Broker, topic: str
    ) -> None:
        await create(broker, topic)
        producer = await broker.producer()
        with pytest.raises(InvalidRequestError):
            await producer.send(topic, bytes(2_000_000), key=b"large")
        with pytest.raises(InvalidRequestError):
            await producer.send(topic, b"x", partition=7)
        assert (await producer.send(topic, b"x")).offset == 0
        await producer.close()
        await producer.close()

    async def test_a_topic_that_does_not_exist_is_refused_and_not_made(self, broker: Broker, topic: str) -> None:
        producer = await broker.producer()
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match=topic) as refusal:
                await producer.send(topic, b"x", key=b"k")
            assert refusal.value.field == "topic"
        assert await broker.partitions(topic) == 0
        await create(broker, topic)  # it may come later
        await producer.send(topic, b"x", key=b"k")
        await producer.close()

    async def test_topics_are_created_once(self, broker: Broker, topic: str) -> None:
        assert await broker.partitions(topic) == 0
        spec = TopicSpec(name=topic, num_partitions=3)
        assert list(await broker.create_topics([spec])) == [topic]
        assert list(await broker.create_topics([spec])) == []
        assert await broker.partitions(topic) == 3

    async def test_a_reader_from_the_end_sees_only_what_comes_later(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 3)
        reader = await broker.reader({place: None})
        assert reader.position(place) == 3
        await produce(broker, topic, 1, start=3)
        assert [record.offset for record in await read(reader, 1)] == [3]
        assert await reader.end_offsets() == {place: 4}
        assert await reader.begin_offsets() == {place: 0}
        await reader.close()
        await reader.close()

    async def test_a_reader_may_be_closed_at_once(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        for offset in (0, None):
            await (await broker.reader({place: offset})).close()

    async def test_a_reader_can_be_sought_back(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 5)
        reader = await broker.reader({place: 0})
        await read(reader, 5)
        reader.seek(place, 2)
        assert reader.position(place) == 2
        assert [record.offset for record in await read(reader, 3)] == [2, 3, 4]
        await reader.close()

    async def test_a_reader_waits_for_a_record_and_returns_empty_in_time(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        reader = await broker.reader({place: 0})
        assert list(await reader.poll(timeout_ms=20)) == []
        waiting = asyncio.create_task(read(reader, 1))
        await produce(broker, topic, 1)
        assert len(await waiting) == 1
        await reader.close()

    async def test_an_offset_outside_the_log_is_expired(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 1)
        reader = await broker.reader({place: 1_000})
        with pytest.raises(StreamExpiredError):
            await read(reader, 1)
        reader.seek(place, 0)
        assert len(await read(reader, 1)) == 1
        await reader.close()

    async def test_a_new_group_starts_at_the_earliest_record(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 3)
        watch = Watch()
        member = await join(broker, topic, f"{topic}-g", watch)
        (assignment,) = watch.assigned
        assert watch.revoked == []
        assert assignment.generation > 0
        assert assignment.partitions == member.assignment() == {place}
        assert assignment.end_offsets == {place: 3}
        assert [record.offset for record in await read(member, 3)] == [0, 1, 2]
        assert await member.committed(place) is None
        await member.close()
        await member.close()

    async def test_a_group_goes_on_at_the_committed_offset(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 4)
        first, second = Watch(), Watch()
        member = await join(broker, topic, f"{topic}-g", first)
        await read(member, 4)
        assert await member.commit({place: 2})
        assert await member.committed(place) == 2
        assert await member.end_offsets(frozenset({place})) == {place: 4}
        assert await member.begin_offsets(frozenset({place})) == {place: 0}
        await member.close()
        member = await join(broker, topic, f"{topic}-g", second)
        assert [record.offset for record in await read(member, 2)] == [2, 3]
        assert second.assigned[0].generation > first.assigned[0].generation
        await member.close()

    async def test_a_paused_partition_is_silent_until_resumed(self, broker: Broker, topic: str) -> None:
        first, second = await create(broker, topic, 2)
        watch = Watch()
        member = await join(broker, topic, f"{topic}-g", watch)
        member.pause(frozenset({first, TopicPartition("unknown", 0)}))
        await produce(broker, topic, 3, partition=0)
        await produce(broker, topic, 3, partition=1)
        assert {record.place for record in await read(member, 3)} == {second}
        assert list(await member.poll(timeout_ms=100, max_records=10)) == []
        member.resume(frozenset({first, second}))
        assert {record.place for record in await read(member, 3)} == {first}
        await member.close()

    async def test_a_second_member_takes_its_share_and_the_first_may_commit_before(
        self, broker: Broker, topic: str
    ) -> None:
        places = await create(broker, topic, 2)
        await produce(broker, topic, 1, partition=0)
        await produce(broker, topic, 1, partition=1)
        one, two = Watch(), Watch()
        first = await join(broker, topic, f"{topic}-g", one, "a")
        assert len(await read(first, 2)) == 2
        one.commit_at_revoke = lambda: first.commit(dict.fromkeys(places, 1))
        joining = asyncio.create_task(join(broker, topic, f"{topic}-g", two, "b"))
        await eventually(_is_done(joining), lambda: polling(first))
        second = joining.result()
        await eventually(_has(one.assigned, 2), lambda: polling(first, second))
        assert one.revoked == [frozenset(places)]
        assert one.results == [True]
        assert one.assigned[-1].generation == two.assigned[-1].generation == one.assigned[0].generation + 1
        assert one.assigned[-1].partitions | two.assigned[-1].partitions == set(places)
        assert not one.assigned[-1].partitions & two.assigned[-1].partitions
        assert all(end == 1 for end in two.assigned[-1].end_offsets.values())
        for member in (first, second):
            assert list(await member.poll(timeout_ms=300, max_records=10)) == [], "committed before the hand-over"
        await first.close()
        await eventually(_has(two.assigned, 2), lambda: polling(second))
        assert two.assigned[-1].partitions == set(places)
        await second.close()

    async def test_a_member_without_a_partition_commits_nothing(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 2)
        one, two = Watch(), Watch()
        first = await join(broker, topic, f"{topic}-g", one, "a")
        joining = asyncio.create_task(join(broker, topic, f"{topic}-g", two, "b"))
        await eventually(_is_done(joining), lambda: polling(first))
        second = joining.result()
        await eventually(_has(one.assigned, 2), lambda: polling(first, second))
        idle, owner = sorted((first, second), key=lambda member: len(member.assignment()))
        assert idle.assignment() == frozenset()
        assert owner.assignment() == {place}
        await idle.close()
        assert not await idle.commit({place: 2})
        await owner.close()
        assert not await owner.commit({place: 2})

    async def test_a_broken_callback_surfaces_from_poll(self, broker: Broker, topic: str) -> None:
        await create(broker, topic)

        async def broken(_: Assignment) -> None:
            raise ValueError("broken callback")

        member = await broker.group_consumer(
            [topic], group=f"{topic}-g", member="a", on_revoked=Watch().on_revoked, on_assigned=broken
        )
        with pytest.raises(ValueError, match="broken callback"):
            await member.poll(timeout_ms=100, max_records=1)
        await member.close()

    async def test_the_pool_consumer_commits_up_to_the_first_unfinished(self, broker: Broker, topic: str) -> None:
        await create(broker, topic)
        await produce(broker, topic, 4)
        group = f"{topic}-g"
        async with PoolConsumer(broker, [topic], group=group, member="a", limits=QUICK) as pool:
            deliveries = await _take(pool, 4)
            assert all(delivery.is_takeover for delivery in deliveries)
            for number in (0, 1, 3):
                deliveries[number].done()
        async with PoolConsumer(broker, [topic], group=group, member="b", limits=QUICK) as pool:
            again = await _take(pool, 2)
            assert [delivery.record.offset for delivery in again] == [2, 3]
            assert again[0].generation > deliveries[0].generation

    async def test_one_to_three_to_one_workers_finish_everything(self, broker: Broker, topic: str) -> None:
        await create(broker, topic, 6)
        group = f"{topic}-g"
        seen: list[tuple[int, int]] = []
        pools = [PoolConsumer(broker, [topic], group=group, member=name, limits=QUICK) for name in "abc"]
        async with pools[0] as first, asyncio.TaskGroup() as tasks:
            tasks.create_task(handle(first, seen))
            await produce(broker, topic, 30, partition=None)
            async with pools[1] as second, pools[2] as third:
                tasks.create_task(handle(second, seen))
                tasks.create_task(handle(third, seen))
                await produce(broker, topic, 30, partition=None, start=30)
                assert await second.drain(10)
                assert await third.drain(10)
            await produce(broker, topic, 30, partition=None, start=60)
            await eventually(_has_all(seen, 90), lambda: asyncio.sleep(0.01))
            assert await first.drain(10)
        assert len(seen) == len(set(seen)), "a record was handed out twice although every worker left in good order"

    async def test_a_member_that_was_just_given_partitions_lives_and_has_its_lease(
        self, broker: Broker, topic: str
    ) -> None:
        await create(broker, topic)
        member = await join(broker, topic, f"{topic}-g", Watch())
        assert member.is_alive()
        assert member.is_leased()
        await member.close()
        assert not member.is_leased()

    async def test_the_pool_consumer_stays_paused_over_rebalances_and_then_goes_on(
        self, broker: Broker, topic: str
    ) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 6)
        owner, idle = ("a", "b") if assign([place], "ab")["a"] else ("b", "a")
        group = f"{topic}-g"
        limits = ConsumerLimits(batch_size=1, max_wait_ms=0, max_in_flight=2, commit_interval_ms=50, poll_timeout_ms=50)
        seen: list[tuple[int, int]] = []
        first = PoolConsumer(broker, [topic], group=group, member=owner, limits=limits)
        async with first:
            held = await _take(first, 2)
            for _ in range(2):
                generation = first.statistics().generation
                await (await join(broker, topic, group, Watch(), idle)).close()
                await eventually(_is_past(first, generation + 1), lambda: asyncio.sleep(0.01))
            assert first.statistics().num_delivered == 2, "nothing more, and nothing twice"
            assert [delivery.is_current() for delivery in held] == [True, True]
            for delivery in held:
                delivery.done()
            handling = asyncio.create_task(handle(first, seen))
            await eventually(_has_all(seen, 4), lambda: asyncio.sleep(0.01))
            assert [offset for _, offset in seen] == [2, 3, 4, 5]
            await first.drain(10)
            await handling


async def _take(pool: PoolConsumer, count: int) -> Sequence[Delivery]:
    taken: list[Delivery] = []
    async with asyncio.timeout(PATIENCE_S):
        async for batch in pool.batches():
            taken.extend(batch)
            if len(taken) >= count:
                return taken
    raise AssertionError("the consumer has ended")


def _is_done(task: asyncio.Task[GroupConsumer]) -> Callable[[], Awaitable[bool]]:
    async def answer() -> bool:
        return task.done()

    return answer


def _is_past(pool: PoolConsumer, generation: int) -> Callable[[], Awaitable[bool]]:
    async def answer() -> bool:
        return pool.statistics().generation > generation

    return answer


def _has(assigned: list[Assignment], count: int) -> Callable[[], Awaitable[bool]]:
    async def answer() -> bool:
        return len(assigned) >= count

    return answer


def _has_all(seen: list[tuple[int, int]], count: int) -> Callable[[], Awaitable[bool]]:
    async def answer() -> bool:
        return len(set(seen)) >= count

    return answer
