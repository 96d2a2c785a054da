"""What is in flight at a pool's consumer is bounded: partitions are paused and resumed."""

from __future__ import annotations

import asyncio

from streams.settings import ConsumerLimits
from tests.streams.pool_work import GROUP, broker_with, consumer, offsets, produce, take


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
