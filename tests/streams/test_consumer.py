"""The pool's consumer on the in-memory broker: what it hands out, commits and counts."""

from __future__ import annotations

import asyncio

import pytest

from schemas.errors import InternalError
from streams.memory import MemoryBroker
from streams.settings import ConsumerLimits
from tests.streams.pool_work import GROUP, P0, TOPIC, broker_with, consumer, offsets, produce, take


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
