"""Members that come and go on a real broker: everything is done, nothing is lost, idle members take over."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from uuid import uuid4

import pytest
import pytest_asyncio

from streams.broker import Producer, TopicPartition, TopicSpec
from streams.consumer import Delivery
from streams.kafka import KafkaBroker
from tests.kafka.steady import Worker, stream, until
from tests.streams.contract_steps import Watch, join

pytestmark = pytest.mark.kafka


@pytest_asyncio.fixture
async def producer(broker: KafkaBroker) -> AsyncIterator[Producer]:
    made = await broker.producer()
    yield made
    await made.close()


async def create(broker: KafkaBroker, num_partitions: int) -> str:
    topic = f"churn-{uuid4().hex[:8]}"
    await broker.create_topics([TopicSpec(name=topic, num_partitions=num_partitions)])
    return topic


async def committed(broker: KafkaBroker, topic: str, num_partitions: int) -> Counter[int]:
    member = await join(broker, topic, topic, Watch(), "look")
    try:
        return Counter({n: await member.committed(TopicPartition(topic, n)) or 0 for n in range(num_partitions)})
    finally:
        await member.close()


def all_done(workers: Sequence[Worker]) -> set[tuple[int, int]]:
    return {each for worker in workers for each in worker.done}


def expected(written: Counter[int]) -> set[tuple[int, int]]:
    return {(partition, offset) for partition, count in written.items() for offset in range(count)}


async def progress(workers: Sequence[Worker]) -> None:
    num_done = len(all_done(workers))
    await until(lambda: len(all_done(workers)) > num_done + 20)


async def some_work(_: Delivery) -> None:
    await asyncio.sleep(random.uniform(0, 0.05))


async def test_five_workers_on_two_partitions_idle_and_take_over(broker: KafkaBroker, producer: Producer) -> None:
    topic = await create(broker, 2)
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(Worker(broker, topic, f"w{n}", work=some_work)) for n in range(5)]
        left = list(workers)
        async with stream(producer, topic, 2, 0.01) as written:
            while left:
                await until(lambda: sum(len(worker.partitions) for worker in left) == 2)
                assert sorted(len(w.partitions) for w in left)[:-2] == [0] * (len(left) - 2)
                owner = next(worker for worker in left if worker.partitions)
                await progress(workers)
                if len(left) == 1:
                    break
                left.remove(owner)
                await (owner.vanish() if len(left) % 2 else owner.stop())
        await until(lambda: all_done(workers) >= expected(written))
        await left[0].stop()
        assert await committed(broker, topic, 2) == written


async def test_twenty_rounds_of_joins_and_leaves_lose_nothing(broker: KafkaBroker, producer: Producer) -> None:
    topic = await create(broker, 8)
    chance = random.Random(7)
    workers: list[Worker] = []
    async with AsyncExitStack() as stack:
        alive: list[Worker] = []

        async def add() -> None:
            worker = Worker(broker, topic, f"w{len(workers)}", work=some_work)
            workers.append(worker)
            alive.append(await stack.enter_async_context(worker))

        await add()
        async with stream(producer, topic, 8, 0.005) as written:
            for _ in range(20):
                if len(alive) < 2 or (len(alive) < 5 and chance.random() < 0.5):
                    await add()
                else:
                    gone = alive.pop(chance.randrange(len(alive)))
                    await (gone.vanish() if chance.random() < 0.3 else gone.stop())
                await progress(workers)
        await until(lambda: all_done(workers) >= expected(written))
        for worker in alive:
            await worker.stop()
    assert all_done(workers) == expected(written)
    assert await committed(broker, topic, 8) == written
    for worker in workers:
        assert set(worker.started.values()) == {1}, "an offset was started twice while its partition stayed ours"
    num_started = sum(sum(worker.started.values()) for worker in workers)
    assert num_started < 1.2 * written.total(), "repeats are for what was in work when its owner went"


async def test_a_commit_never_passes_unfinished_work_over_rebalances(broker: KafkaBroker, producer: Producer) -> None:
    topic = await create(broker, 4)
    held: dict[tuple[int, int], Delivery] = {}

    async def hold_some(delivery: Delivery) -> None:
        if delivery.record.offset == 5:
            held[delivery.record.partition, delivery.record.offset] = delivery
            await asyncio.Event().wait()

    for number in range(40):
        await producer.send(topic, b"%d" % number, partition=number % 4)
    async with Worker(broker, topic, "a", work=hold_some) as first:
        await until(lambda: len(first.done) == 36 and len(held) == 4)
        async with Worker(broker, topic, "b", work=hold_some), Worker(broker, topic, "c", work=hold_some):
            await until(lambda: sum(delivery.is_current() for delivery in held.values()) >= 1)
            await until(lambda: first.consumer.statistics().lag is not None)
        await first.vanish()
    assert await committed(broker, topic, 4) == Counter(dict.fromkeys(range(4), 5))


async def test_restarts_neither_repeat_nor_skip(broker: KafkaBroker, producer: Producer) -> None:
    topic = await create(broker, 1)
    seen: list[tuple[int, int]] = []
    for round_number in range(5):
        for number in range(7):
            await producer.send(topic, b"%d" % number, partition=0)
        async with Worker(broker, topic, f"w{round_number % 2}") as worker:
            await until(lambda: len(worker.done) == 7)
        seen += worker.done
    assert seen == [(0, offset) for offset in range(35)]


async def test_two_members_of_the_same_name_both_work(broker: KafkaBroker, producer: Producer) -> None:
    topic = await create(broker, 4)
    async with Worker(broker, topic, "same") as one, Worker(broker, topic, "same") as two:
        await until(lambda: len(one.partitions) == len(two.partitions) == 2)
        assert not one.partitions & two.partitions
        async with stream(producer, topic, 4, 0.005) as written:
            await until(lambda: written.total() >= 40)
        await until(lambda: len(all_done([one, two])) == written.total())


async def test_a_join_moves_only_what_it_must(broker: KafkaBroker) -> None:
    topic = await create(broker, 12)
    async with Worker(broker, topic, "a") as one, Worker(broker, topic, "b") as two:
        await until(lambda: len(one.partitions) == len(two.partitions) == 6)
        before = {place: worker.name for worker in (one, two) for place in worker.partitions}
        async with Worker(broker, topic, "c") as three:
            await until(lambda: len(three.partitions) == len(one.partitions) == 4)
            after = {place: worker.name for worker in (one, two, three) for place in worker.partitions}
            assert sum(before[place] != after[place] for place in before) <= 6
        await until(lambda: len(one.partitions) == len(two.partitions) == 6)
        assert {place: worker.name for worker in (one, two) for place in worker.partitions} == before
