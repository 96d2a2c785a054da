"""The pool's consumer, on the in-memory broker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest

from schemas.errors import InternalError
from streams.broker import Record, TopicPartition, TopicSpec
from streams.consumer import Delivery, PoolConsumer
from streams.memory import MemoryBroker
from streams.settings import ConsumerLimits

TOPIC = "work"
GROUP = "gea-test-blue"
P0 = TopicPartition(TOPIC, 0)
QUICK = ConsumerLimits(batch_size=4, max_wait_ms=0, commit_interval_ms=5, poll_timeout_ms=1000)


async def broker_with(num_partitions: int = 1) -> MemoryBroker:
    broker = MemoryBroker()
    await broker.create_topics([TopicSpec(name=TOPIC, num_partitions=num_partitions)])
    return broker


async def produce(broker: MemoryBroker, count: int, partition: int | None = 0) -> list[Record]:
    producer = await broker.producer()
    return [
        await producer.send(TOPIC, b"%d" % n, key=b"%d" % n if partition is None else None, partition=partition)
        for n in range(count)
    ]


def consumer(broker: MemoryBroker, member: str = "a", limits: ConsumerLimits = QUICK) -> PoolConsumer:
    return PoolConsumer(broker, [TOPIC], group=GROUP, member=member, limits=limits)


async def take(batches: AsyncIterator[Sequence[Delivery]], count: int) -> list[Delivery]:
    taken: list[Delivery] = []
    while len(taken) < count:
        taken.extend(await anext(batches))
    return taken


def offsets(deliveries: Sequence[Delivery]) -> list[int]:
    return [delivery.record.offset for delivery in deliveries]


async def test_commit_stops_at_first_unfinished_offset() -> None:
    broker = await broker_with()
    await produce(broker, 4)
    async with consumer(broker) as pool:
        first, second, third, fourth = await take(pool.batches(), 4)
        for delivery in (third, first, fourth):
            delivery.done()
        await broker.until(lambda: broker.committed(GROUP, P0) == 1)
        second.done()
        await broker.until(lambda: broker.committed(GROUP, P0) == 4)


async def test_a_restarted_worker_neither_repeats_nor_skips() -> None:
    broker = await broker_with()
    await produce(broker, 5)
    async with consumer(broker) as pool:
        for delivery in (await take(pool.batches(), 4))[:3]:
            delivery.done()
    async with consumer(broker, "b") as pool:
        assert offsets(await take(pool.batches(), 2)) == [3, 4]


async def test_a_broker_that_is_away_at_the_start_is_waited_for() -> None:
    broker = await broker_with()
    await produce(broker, 1)
    broker.down = True
    pool = consumer(broker)
    entering = asyncio.create_task(pool.__aenter__())
    done, _ = await asyncio.wait((entering,), timeout=0.05)
    assert not done
    broker.down = False
    async with asyncio.timeout(5):
        await entering
        assert offsets(await take(pool.batches(), 1)) == [0]
    await pool.close()


async def test_waiting_for_a_broker_at_the_start_can_be_cancelled() -> None:
    broker = await broker_with()
    broker.down = True
    entering = asyncio.create_task(consumer(broker).__aenter__())
    done, _ = await asyncio.wait((entering,), timeout=0.05)
    assert not done
    entering.cancel()
    with pytest.raises(asyncio.CancelledError):
        await entering


async def test_done_twice_counts_once() -> None:
    broker = await broker_with()
    await produce(broker, 2)
    async with consumer(broker) as pool:
        first, _ = await take(pool.batches(), 2)
        first.done()
        first.done()
        assert pool.statistics().num_in_flight == 1
        await broker.until(lambda: broker.committed(GROUP, P0) == 1)


async def test_a_full_batch_is_handed_out_without_waiting() -> None:
    broker = await broker_with()
    await produce(broker, 5)
    async with consumer(broker, limits=ConsumerLimits(batch_size=3, max_wait_ms=60_000)) as pool:
        assert len(await anext(pool.batches())) == 3


async def test_a_partial_batch_is_handed_out_after_max_wait() -> None:
    broker = await broker_with()
    await produce(broker, 2)
    async with consumer(broker, limits=ConsumerLimits(batch_size=3, max_wait_ms=10)) as pool:
        assert len(await anext(pool.batches())) == 2


async def test_in_flight_is_bounded_by_pausing_and_lifted_at_half() -> None:
    broker = await broker_with(2)
    await produce(broker, 20, partition=0)
    await produce(broker, 20, partition=1)
    limits = ConsumerLimits(batch_size=1, max_wait_ms=0, max_in_flight=8, poll_timeout_ms=5)
    async with consumer(broker, limits=limits) as pool:
        batches = pool.batches()
        held = await take(batches, 8)
        last_poll_at = pool.statistics().last_poll_at
        assert pool.statistics().num_in_flight == 8
        async with asyncio.timeout(5):
            while pool.statistics().num_paused < 2:
                await broker.wait(0.001)
        for delivery in held[:3]:
            delivery.done()
        assert pool.statistics().num_paused == 2, "lifted too early"
        held[3].done()
        assert pool.statistics().num_paused == 0
        await take(batches, 4)
        assert pool.statistics().num_in_flight <= 8
        assert pool.statistics().last_poll_at > last_poll_at


async def test_quick_work_is_never_paused_though_it_fills_the_bound() -> None:
    broker = await broker_with()
    await produce(broker, 60)
    limits = ConsumerLimits(batch_size=4, max_wait_ms=0, max_in_flight=4, poll_timeout_ms=1_000)
    async with consumer(broker, limits=limits) as pool:
        batches = pool.batches()
        for _ in range(15):
            full = await take(batches, 4)
            assert pool.statistics().num_in_flight == 4
            for delivery in full:
                delivery.done()
            assert pool.statistics().num_paused == 0


async def test_polling_goes_on_while_everything_is_paused() -> None:
    broker = await broker_with()
    await produce(broker, 3)
    limits = ConsumerLimits(batch_size=1, max_wait_ms=0, max_in_flight=2, poll_timeout_ms=1, commit_interval_ms=1)
    async with consumer(broker, limits=limits) as pool:
        await take(pool.batches(), 2)
        before = pool.statistics().last_poll_at
        async with asyncio.timeout(5):
            while pool.statistics().last_poll_at == before:
                await broker.wait(0.001)


async def test_a_partition_is_paused_by_the_span_of_its_offsets() -> None:
    broker = await broker_with(2)
    await produce(broker, 30, partition=0)
    limits = ConsumerLimits(batch_size=1, max_wait_ms=0, max_in_flight=64, window=6, poll_timeout_ms=5)
    async with consumer(broker, limits=limits) as pool:
        batches = pool.batches()
        (head,) = await anext(batches)
        while pool.statistics().num_waiting or not pool.statistics().num_paused:
            (delivery,) = await anext(batches)
            delivery.done()
        assert pool.statistics().num_delivered < 12
        assert pool.statistics().num_paused == 1, "only the partition that is behind"
        await produce(broker, 1, partition=1)
        assert (await anext(batches))[0].record.partition == 1
        head.done()
        assert pool.statistics().num_paused == 0
        assert (await anext(batches))[0].record.partition == 0


async def test_pause_is_applied_again_after_a_rebalance() -> None:
    broker = await broker_with()
    await produce(broker, 10)
    limits = ConsumerLimits(batch_size=1, max_wait_ms=0, max_in_flight=2, poll_timeout_ms=5)
    async with consumer(broker, limits=limits) as pool:
        batches = pool.batches()
        held = await take(batches, 2)
        await broker.rebalance(GROUP)
        assert pool.statistics().num_paused == 1
        assert pool.statistics().num_in_flight == 2
        for delivery in held:
            delivery.done()
        assert offsets(await take(batches, 2)) == [2, 3]


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


async def test_a_poison_record_does_not_block() -> None:
    broker = await broker_with()
    await produce(broker, 3)
    async with consumer(broker) as pool:
        for delivery in await take(pool.batches(), 3):
            try:
                if delivery.record.value == b"1":
                    raise ValueError("poison")
            except ValueError:
                pass  # the worker's edge dead-letters it, and then acknowledges like any other
            delivery.done()
        await broker.until(lambda: broker.committed(GROUP, P0) == 3)


async def test_drain_waits_for_work_in_flight_and_hands_out_no_more() -> None:
    broker = await broker_with()
    await produce(broker, 4)
    limits = ConsumerLimits(batch_size=1, max_wait_ms=0)
    async with consumer(broker, limits=limits) as pool:
        batches = pool.batches()
        (first,) = await anext(batches)
        draining = asyncio.create_task(pool.drain(5))
        await asyncio.sleep(0)
        assert not draining.done()
        first.done()
        assert await draining
        assert broker.committed(GROUP, P0) == 1
        assert [batch async for batch in batches] == []


async def test_drain_gives_up_in_time() -> None:
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        await take(pool.batches(), 1)
        assert not await pool.drain(0.01)


async def test_polling_survives_a_broker_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.consumer.RETRY_S", 0.001)
    broker = await broker_with()
    async with consumer(broker) as pool:
        broker.down = True
        await broker.wait(0.005)
        broker.down = False
        await produce(broker, 1)
        assert offsets(await take(pool.batches(), 1)) == [0]


async def test_a_crash_of_the_polling_task_surfaces_from_batches() -> None:
    broker = await broker_with()

    class Broken(MemoryBroker):
        def check_up(self) -> None:
            raise InternalError("broken log")

    async with consumer(broker) as pool:
        broker.check_up = Broken.check_up.__get__(broker)  # type: ignore[method-assign]
        broker.notify()
        with pytest.raises(InternalError, match="broken log"):
            await anext(pool.batches())
        del broker.check_up


async def test_lag_counts_what_is_not_committed() -> None:
    broker = await broker_with()
    await produce(broker, 3)
    async with consumer(broker) as pool:
        first, *_ = await take(pool.batches(), 3)
        first.done()
        async with asyncio.timeout(5):
            while pool.statistics().lag != 2:
                await broker.wait(0.01)


async def test_lag_does_not_count_what_retention_has_removed() -> None:
    broker = await broker_with()
    await produce(broker, 5)
    broker.expire(TOPIC, 0, before=5)
    async with consumer(broker) as pool, asyncio.timeout(5):
        while pool.statistics().lag is None:
            await pool._woken(0.01)
        assert pool.statistics().lag == 0


async def test_lag_from_a_commit_that_retention_has_overtaken_counts_what_is_left() -> None:
    broker = await broker_with()
    await produce(broker, 5)
    broker.group(GROUP).committed[P0] = 1
    broker.expire(TOPIC, 0, before=4)
    async with consumer(broker) as pool, asyncio.timeout(5):
        while pool.statistics().lag is None:
            await pool._woken(0.01)
        assert pool.statistics().lag == 1
