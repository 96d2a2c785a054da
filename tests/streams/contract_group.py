"""What every broker must do for the members of a group, and for a pool's consumer that is one."""

from __future__ import annotations

import asyncio

import pytest

from streams.assignor import assign
from streams.broker import Assignment, Broker, TopicPartition
from streams.consumer import PoolConsumer
from streams.settings import ConsumerLimits
from tests.streams.contract_steps import (
    QUICK,
    Watch,
    create,
    eventually,
    handle,
    has,
    has_all,
    is_done,
    is_past,
    join,
    polling,
    produce,
    read,
    take,
)


class GroupContract:
    """Members of a group."""

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
        await eventually(is_done(joining), lambda: polling(first))
        second = joining.result()
        await eventually(has(one.assigned, 2), lambda: polling(first, second))
        assert one.revoked == [frozenset(places)]
        assert one.results == [True]
        assert one.assigned[-1].generation == two.assigned[-1].generation == one.assigned[0].generation + 1
        assert one.assigned[-1].partitions | two.assigned[-1].partitions == set(places)
        assert not one.assigned[-1].partitions & two.assigned[-1].partitions
        assert all(end == 1 for end in two.assigned[-1].end_offsets.values())
        for member in (first, second):
            assert list(await member.poll(timeout_ms=300, max_records=10)) == [], "committed before the hand-over"
        await first.close()
        await eventually(has(two.assigned, 2), lambda: polling(second))
        assert two.assigned[-1].partitions == set(places)
        await second.close()

    async def test_a_member_without_a_partition_commits_nothing(self, broker: Broker, topic: str) -> None:
        (place,) = await create(broker, topic)
        await produce(broker, topic, 2)
        one, two = Watch(), Watch()
        first = await join(broker, topic, f"{topic}-g", one, "a")
        joining = asyncio.create_task(join(broker, topic, f"{topic}-g", two, "b"))
        await eventually(is_done(joining), lambda: polling(first))
        second = joining.result()
        await eventually(has(one.assigned, 2), lambda: polling(first, second))
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
            deliveries = await take(pool, 4)
            assert all(delivery.is_takeover for delivery in deliveries)
            for number in (0, 1, 3):
                deliveries[number].done()
        async with PoolConsumer(broker, [topic], group=group, member="b", limits=QUICK) as pool:
            again = await take(pool, 2)
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
            await eventually(has_all(seen, 90), lambda: asyncio.sleep(0.01))
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
            held = await take(first, 2)
            for _ in range(2):
                generation = first.statistics().generation
                await (await join(broker, topic, group, Watch(), idle)).close()
                await eventually(is_past(first, generation + 1), lambda: asyncio.sleep(0.01))
            assert first.statistics().num_delivered == 2, "nothing more, and nothing twice"
            assert [delivery.is_current() for delivery in held] == [True, True]
            for delivery in held:
                delivery.done()
            handling = asyncio.create_task(handle(first, seen))
            await eventually(has_all(seen, 4), lambda: asyncio.sleep(0.01))
            assert [offset for _, offset in seen] == [2, 3, 4, 5]
            await first.drain(10)
            await handling
