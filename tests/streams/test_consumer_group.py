"""Members of a pool's group that come, go and die: whose work a partition is, and from where."""

from __future__ import annotations

import asyncio

from streams.consumer import Delivery, PoolConsumer
from tests.streams.pool_work import GROUP, P0, TOPIC, broker_with, consumer, offsets, produce, take


async def test_work_goes_on_over_a_rebalance_that_keeps_the_partition() -> None:
    broker = await broker_with()
    await produce(broker, 4)
    async with consumer(broker) as pool:
        batches = pool.batches()
        first, second, third, fourth = await take(batches, 4)
        second.done()
        await broker.rebalance(GROUP)
        assert first.is_current()
        await produce(broker, 1)
        assert offsets(await take(batches, 1)) == [4], "what runs or is done is not handed out again"
        for delivery in (first, third, fourth):
            delivery.done()
        await broker.until(lambda: broker.committed(GROUP, P0) == 4)


async def test_a_lost_partition_cancels_its_work_and_its_late_acknowledgement_commits_nothing() -> None:
    broker = await broker_with(2)
    await produce(broker, 1, partition=0)
    await produce(broker, 1, partition=1)
    async with consumer(broker) as pool:
        deliveries = await take(pool.batches(), 2)
        tasks = [asyncio.create_task(asyncio.Event().wait()) for _ in deliveries]
        for delivery, task in zip(deliveries, tasks, strict=True):
            delivery.attach(task)
        async with consumer(broker, "b") as other:
            (again,) = await take(other.batches(), 1)
            lost, kept = sorted(deliveries, key=Delivery.is_current)
            assert (lost.is_current(), kept.is_current()) == (False, True)
            assert again.record.place == lost.record.place
            assert again.is_takeover
            assert again.generation > lost.generation
            lost.done()
            kept.done()
            await broker.until(lambda: broker.committed(GROUP, kept.record.place) == 1)
            assert broker.committed(GROUP, lost.record.place) is None
            assert [task.cancelling() for task in tasks] == [int(not d.is_current()) for d in deliveries]
    assert all(task.cancelling() for task in tasks), "leaving the group ends the rest"
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_partition_that_was_away_for_a_generation_starts_anew() -> None:
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        batches = pool.batches()
        (first,) = await take(batches, 1)
        broker.group(GROUP).generation += 1  # a generation that this member has not seen
        await broker.rebalance(GROUP)
        assert not first.is_current()
        (again,) = await take(batches, 1)
        assert again.record == first.record
        assert again.generation == first.generation + 2


async def test_a_task_attached_after_the_loss_is_cancelled_at_once() -> None:
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        (delivery,) = await take(pool.batches(), 1)
    task = asyncio.create_task(asyncio.Event().wait())
    delivery.attach(task)
    assert task.cancelling()
    await asyncio.gather(task, return_exceptions=True)


async def test_work_of_a_killed_member_is_redelivered_as_takeover() -> None:
    broker = await broker_with()
    await produce(broker, 3)
    async with consumer(broker) as pool:
        held = await take(pool.batches(), 3)
        assert all(delivery.is_takeover for delivery in held), "they were there before"
        held[0].done()
        await broker.until(lambda: broker.committed(GROUP, P0) == 1)
        await broker.kill("a")
        async with consumer(broker, "b") as heir:
            batches = heir.batches()
            again = await take(batches, 2)
            assert offsets(again) == [1, 2]
            assert all(delivery.is_takeover for delivery in again)
            held[1].done()
            await pool.drain(0)
            assert broker.committed(GROUP, P0) == 1, "a dead member commits nothing"
            await produce(broker, 1)
            (fresh,) = await take(batches, 1)
            assert not fresh.is_takeover


async def test_one_to_three_to_one_members_finish_every_record_once() -> None:
    broker = await broker_with(6)
    finished: list[tuple[int, int]] = []

    async def work(pool: PoolConsumer) -> None:
        async for batch in pool.batches():
            for delivery in batch:
                await asyncio.sleep(0)
                if delivery.is_current():
                    finished.append((delivery.record.partition, delivery.record.offset))
                    delivery.done()

    async with consumer(broker, "a") as a, asyncio.TaskGroup() as group:
        group.create_task(work(a))
        await produce(broker, 60, partition=None)
        async with consumer(broker, "b") as b, consumer(broker, "c") as c:
            group.create_task(work(b))
            group.create_task(work(c))
            await produce(broker, 60, partition=None)
            assert {each.statistics().num_partitions for each in (a, b, c)} == {2}
            assert await b.drain(5)
            assert await c.drain(5)
        await produce(broker, 60, partition=None)
        places = broker.places(TOPIC)
        await broker.until(lambda: sum(broker.committed(GROUP, place) or 0 for place in places) == 180)
        assert await a.drain(5)
    assert len(set(finished)) == 180
    assert len(finished) == 180


async def test_more_members_than_partitions_idle_and_take_over() -> None:
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker, "a") as a, consumer(broker, "b") as b:
        pools = [("a", a), ("b", b)]
        owner, idle = sorted(pools, key=lambda pool: pool[1].statistics().num_partitions, reverse=True)
        assert idle[1].statistics().num_partitions == 0
        await broker.kill(owner[0])
        (delivery,) = await take(idle[1].batches(), 1)
        assert delivery.record.offset == 0
