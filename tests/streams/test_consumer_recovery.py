"""A consumer whose member is stuck or dead, or only seems to be, on the in-memory broker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from schemas.errors import BrokerUnavailableError
from streams.consumer import RETRY_S, PoolConsumer
from streams.memory import MemoryBroker
from streams.memory_clients import MemoryGroupConsumer
from streams.settings import ConsumerLimits
from tests.streams.pool_work import GROUP, P0, TOPIC, broker_with, offsets, produce, take, until

WATCHED = ConsumerLimits(batch_size=1, max_wait_ms=0, commit_interval_ms=1, poll_timeout_ms=5, stuck_ms=40)


def consumer(broker: MemoryBroker, member: str = "a", limits: ConsumerLimits = WATCHED) -> PoolConsumer:
    return PoolConsumer(broker, [TOPIC], group=GROUP, member=member, limits=limits)


def freeze(member: MemoryGroupConsumer) -> None:
    member.is_stuck = True
    member._log.positions.clear()  # the poll that runs already shall bring nothing


def forget_positions(member: MemoryGroupConsumer) -> None:
    member._log.positions.clear()


def die(member: MemoryGroupConsumer) -> None:
    member.is_dead = True
    member._log.positions.clear()


@pytest.mark.parametrize("break_it", [freeze, forget_positions, die])
async def test_a_stuck_member_is_replaced_and_its_records_come_again(
    break_it: Callable[[MemoryGroupConsumer], None],
) -> None:
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        batches = pool.batches()
        (first,) = await take(batches, 1)
        first.done()
        await broker.until(lambda: broker.committed(GROUP, P0) == 1)
        (old,) = broker.members("a")
        break_it(old)
        await produce(broker, 2)
        fresh = await take(batches, 2)
        assert offsets(fresh) == [1, 2]
        assert fresh[0].generation > first.generation
        assert pool.statistics().num_rebuilds >= 1
        assert old not in broker.members("a"), "the stuck one has left"
        for delivery in fresh:
            delivery.done()
        await broker.until(lambda: broker.committed(GROUP, P0) == 3)


async def test_a_rebalance_that_never_ends_is_ended() -> None:
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        batches = pool.batches()
        (first,) = await take(batches, 1)
        (old,) = broker.members("a")
        await old.revoke()
        assert not first.is_leased()
        (again,) = await take(batches, 1)
        assert again.record == first.record
        assert (first.is_current(), again.is_current()) == (False, True)


async def test_work_of_a_stuck_member_is_cancelled_and_taken_over() -> None:
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        batches = pool.batches()
        (first,) = await take(batches, 1)
        work = asyncio.create_task(asyncio.Event().wait())
        first.attach(work)
        freeze(broker.members("a")[0])
        (again,) = await take(batches, 1)
        assert work.cancelling()
        assert again.is_takeover
        first.done()
        again.done()
        await broker.until(lambda: broker.committed(GROUP, P0) == 1)
        await asyncio.gather(work, return_exceptions=True)


async def test_a_member_that_dies_while_it_drains_is_not_replaced_and_its_work_is_not_waited_for() -> None:
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        await take(pool.batches(), 1)
        draining = asyncio.create_task(pool.drain(3_600))
        await until(broker, lambda: broker.members("a")[0]._log.paused == {P0})
        (old,) = broker.members("a")
        die(old)
        async with asyncio.timeout(5):
            await draining
        await until(broker, lambda: not broker.members("a"))
        assert pool.statistics().num_in_flight == 0
    assert broker.committed(GROUP, P0) is None
    assert broker.group(GROUP).generation == 2  # it joined and it left


async def test_a_busy_a_paused_and_an_idle_member_are_not_stuck() -> None:
    broker = await broker_with()
    await produce(broker, 3)
    limits = ConsumerLimits(
        batch_size=1, max_wait_ms=0, max_in_flight=1, commit_interval_ms=1, poll_timeout_ms=1, stuck_ms=10
    )
    async with consumer(broker, limits=limits) as pool, consumer(broker, "b", limits) as other:
        busy = next(each for each in (pool, other) if each.statistics().num_partitions)
        (held,) = await take(busy.batches(), 1)
        began = asyncio.get_running_loop().time()
        await until(broker, lambda: asyncio.get_running_loop().time() > began + 0.1)
        assert held.is_current()
        assert busy.statistics().num_paused == 1
        assert [each.statistics().num_rebuilds for each in (pool, other)] == [0, 0]


async def test_a_process_that_stood_still_is_no_reason_to_replace_a_member() -> None:
    broker = await broker_with()
    async with consumer(broker) as pool:
        for _ in range(10):
            polled_at = pool.statistics().last_poll_at
            time.sleep(2 * WATCHED.stuck_ms / 1000)  # noqa: ASYNC251 - nobody has a turn
            await until(broker, lambda before=polled_at: pool.statistics().last_poll_at > before)  # type: ignore[misc]
        assert pool.statistics().num_rebuilds == 0


async def test_a_broker_that_is_away_is_no_reason_to_replace_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.consumer.RETRY_S", 0.002)
    broker = await broker_with()
    await produce(broker, 1)
    async with consumer(broker) as pool:
        (first,) = await take(pool.batches(), 1)
        broker.down = True
        began = asyncio.get_running_loop().time()
        await until(broker, lambda: asyncio.get_running_loop().time() > began + 0.15)
        broker.down = False
        await until(broker, lambda: pool.statistics().lag == 1)
        assert first.is_current()
        assert pool.statistics().num_rebuilds == 0


async def test_joining_anew_waits_for_a_broker_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streams.consumer.RETRY_S", 0.002)
    broker = await broker_with()
    async with consumer(broker) as pool:
        join, attempts = broker.group_consumer, 0

        async def refuse_twice(*args: Any, **kwargs: Any) -> MemoryGroupConsumer:
            nonlocal attempts
            attempts += 1
            if attempts <= 2:
                raise BrokerUnavailableError("away")
            return await join(*args, **kwargs)

        monkeypatch.setattr(broker, "group_consumer", refuse_twice)
        die(broker.members("a")[0])
        await produce(broker, 1)
        assert offsets(await take(pool.batches(), 1)) == [0]
        assert attempts == 3


async def test_where_replacing_does_not_help_it_is_tried_less_and_less_often() -> None:
    broker = await broker_with()

    async with consumer(broker) as pool:
        begun = asyncio.get_running_loop().time()
        await produce(broker, 1)
        while pool.statistics().num_rebuilds < 3:
            for member in broker.members("a"):
                forget_positions(member)
            await broker.wait(0.001)
        assert asyncio.get_running_loop().time() - begun > 0.04 * (1 + 2 + 4)


async def test_members_that_die_at_once_do_not_keep_the_group_rebalancing(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def noted(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    monkeypatch.setattr(MemoryGroupConsumer, "is_alive", lambda _: False)
    broker = await broker_with()
    async with consumer(broker) as pool:
        monkeypatch.setattr("streams.consumer.asyncio.sleep", noted)
        await until(broker, lambda: pool.statistics().num_rebuilds == 8)
        monkeypatch.undo()
    waited = [pause for pause in pauses if pause >= RETRY_S / 2]
    assert waited == sorted(waited)
    assert waited[:3] == [RETRY_S / 2, RETRY_S * 1.5, RETRY_S * 3.5]
    assert waited[-1] < 60
