"""A consumer over rebalances: what it holds, has lost, gets back and may hand out, on the in-memory broker."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from streams.broker import TopicPartition
from streams.consumer import Delivery
from streams.settings import ConsumerLimits
from tests.streams.pool_work import GROUP, P0, TOPIC, broker_with, consumer, offsets, produce, take, until


async def test_nothing_is_handed_out_while_the_lease_is_in_doubt() -> None:
    broker = await broker_with()
    async with consumer(broker) as pool:
        (member,) = broker.members("a")
        member.is_unheard = True
        await produce(broker, 1)
        await until(broker, lambda: pool.statistics().num_waiting == 1)
        next_batch = asyncio.create_task(take(pool.batches(), 1))
        await broker.wait(0.02)
        assert not next_batch.done()
        member.is_unheard = False
        (delivery,) = await next_batch
        assert delivery.is_leased()
        member.is_unheard = True
        assert not delivery.is_leased()
        assert delivery.is_current(), "what runs goes on: whether its words count, the log decides"


async def test_a_partition_lost_and_regained_is_handed_out_again_once() -> None:
    broker = await broker_with(2)
    await produce(broker, 2, partition=0)
    await produce(broker, 2, partition=1)
    async with consumer(broker) as pool:
        batches = pool.batches()
        held = await take(batches, 4)
        async with consumer(broker, "b"):
            lost = [delivery for delivery in held if not delivery.is_current()]
            assert len(lost) == 2
        again = await take(batches, 2)
        assert [d.record for d in again] == [d.record for d in lost]
        assert all(delivery.is_takeover for delivery in again)
        assert min(d.generation for d in again) > max(d.generation for d in held)
        for delivery in (*lost, *again, *held):
            delivery.done()
        await broker.until(lambda: all(broker.committed(GROUP, place) == 2 for place in broker.places(TOPIC)))
        assert pool.statistics().num_in_flight == 0


async def test_trackers_survive_many_rebalances_and_nothing_is_started_twice() -> None:
    broker = await broker_with(4)
    for partition in range(4):
        await produce(broker, 3, partition=partition)
    async with consumer(broker) as pool:
        held = await take(pool.batches(), 12)
        for _ in range(20):
            await broker.rebalance(GROUP)
        await until(broker, lambda: pool.statistics().lag == 12)
        assert pool.statistics().num_delivered == 12
        assert all(delivery.is_current() for delivery in held)


async def test_a_commit_that_hangs_does_not_hold_a_rebalance_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.membership.REVOKE_COMMIT_S", 0.01)
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        (first,) = await take(pool.batches(), 1)
        (member,) = broker.members("a")

        async def hang(offsets: Mapping[TopicPartition, int]) -> bool:
            await asyncio.Event().wait()
            return False

        monkeypatch.setattr(member, "commit", hang)
        first.done()
        async with asyncio.timeout(2):
            await broker.rebalance(GROUP)
        monkeypatch.undo()
        assert pool.statistics().generation == 2


async def test_quick_work_is_finished_before_its_partition_goes_away() -> None:
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        (first,) = await take(pool.batches(), 1)
        rebalance = asyncio.create_task(broker.rebalance(GROUP))
        await asyncio.sleep(0)
        first.done()
        await rebalance
        assert broker.committed(GROUP, P0) == 1


async def test_the_pause_is_lifted_after_a_rebalance_that_came_in_between() -> None:
    broker = await broker_with()
    await produce(broker, 4)
    limits = ConsumerLimits(batch_size=1, max_wait_ms=0, max_in_flight=2, poll_timeout_ms=5)
    async with consumer(broker, limits=limits) as pool:
        batches = pool.batches()
        held = await take(batches, 2)
        for _ in range(3):
            await broker.rebalance(GROUP)
            assert pool.statistics().num_paused == 1
            assert broker.members("a")[0]._log.paused == {P0}, "the broker's own flag, not our note of it"
        for delivery in held:
            delivery.done()
        assert broker.members("a")[0]._log.paused == set()
        assert offsets(await take(batches, 2)) == [2, 3]


async def test_time_and_failures_of_requests_are_told() -> None:
    broker = await broker_with()
    await produce(broker, 4)
    async with consumer(broker) as pool:
        deliveries: list[Delivery] = await take(pool.batches(), 4)
        assert (pool.statistics().request_ms, pool.statistics().error_rate) == (0.0, 0.0)
        for delivery in deliveries[:2]:
            delivery.done()
        assert pool.statistics().request_ms > 0
        assert pool.statistics().error_rate == 0
        deliveries[2].fail()
        deliveries[2].done()
        deliveries[3].done()
        assert 0.05 < pool.statistics().error_rate < 0.1


async def test_idle_means_that_nothing_waits_and_nothing_runs() -> None:
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        (delivery,) = await take(pool.batches(), 1)
        assert not await pool.idle(0.02)
        waiting = asyncio.create_task(pool.idle(5))
        await asyncio.sleep(0)
        delivery.done()
        assert await waiting
        assert broker.committed(GROUP, P0) == 1
