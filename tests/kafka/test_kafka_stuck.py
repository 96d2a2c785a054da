"""A member that is stuck, frozen or cut off from a real broker: replaced, without a lease, or ended in time."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from ops.embedded import EmbeddedKafka, MissingPrerequisiteError
from schemas.errors import BrokerUnavailableError
from streams.broker import TopicSpec
from streams.consumer import Delivery
from streams.kafka import KafkaBroker
from streams.settings import BrokerSettings, ConsumerLimits, Timeouts
from tests.kafka.conftest import TIMEOUTS
from tests.kafka.steady import Worker, stream, until

pytestmark = pytest.mark.kafka
WATCHED = ConsumerLimits(batch_size=4, max_wait_ms=1, commit_interval_ms=50, poll_timeout_ms=100, stuck_ms=1_000)


async def create(broker: KafkaBroker, num_partitions: int = 1) -> str:
    topic = f"stuck-{uuid4().hex[:8]}"
    await broker.create_topics([TopicSpec(name=topic, num_partitions=num_partitions)])
    return topic


def member_of(worker: Worker) -> Any:
    assert worker.consumer._membership is not None
    return worker.consumer._membership._member


async def kill_coordination(worker: Worker) -> None:
    member_of(worker)._client._coordinator._coordination_task.cancel()


async def hang_fetching(worker: Worker) -> None:
    async def hang(*_: Any, **__: Any) -> None:
        await asyncio.Event().wait()

    member_of(worker)._client.getmany = hang


async def stop_fetching(worker: Worker) -> None:
    """As in aiokafka#847: polls return, heartbeats go on, and nothing comes."""

    async def nothing(*_: Any, timeout_ms: int = 0, **__: Any) -> dict[Any, Any]:
        await asyncio.sleep(timeout_ms / 1000)
        return {}

    member_of(worker)._client.getmany = nothing


async def rebalance_for_ever(worker: Worker) -> None:
    await member_of(worker).on_partitions_revoked(frozenset())


@pytest.mark.parametrize("break_it", [kill_coordination, hang_fetching, stop_fetching, rebalance_for_ever])
async def test_a_stuck_member_is_replaced(broker: KafkaBroker, break_it: Callable[[Worker], Awaitable[None]]) -> None:
    topic = await create(broker)
    producer = await broker.producer()
    async with (
        Worker(broker, topic, "a", limits=WATCHED) as worker,
        stream(producer, topic, 1, 0.02) as written,
    ):
        await until(lambda: len(worker.done) > 5)
        old, generation = member_of(worker), worker.consumer.statistics().generation
        await break_it(worker)
        await until(lambda: worker.consumer.statistics().num_rebuilds == 1, 15)
        num_done = len(worker.done)
        await until(lambda: len(worker.done) > num_done + 20, 15)
        assert worker.consumer.statistics().generation > generation
        assert member_of(worker) is not old
        num_written = written.total()
        await until(lambda: {(0, offset) for offset in range(num_written)} <= set(worker.done))
        assert worker.consumer.statistics().num_rebuilds == 1
    await producer.close()


async def test_work_of_a_stuck_member_goes_to_its_peers(broker: KafkaBroker) -> None:
    topic = await create(broker, 2)
    producer = await broker.producer()
    taken: list[tuple[str, Delivery]] = []

    def hold(name: str) -> Callable[[Delivery], Any]:
        async def work(delivery: Delivery) -> None:
            taken.append((name, delivery))
            await asyncio.Event().wait()

        return work

    async with (
        Worker(broker, topic, "a", limits=WATCHED, work=hold("a")) as one,
        Worker(broker, topic, "b", limits=WATCHED, work=hold("b")) as two,
    ):
        await until(lambda: len(one.partitions) == len(two.partitions) == 1)
        (place,) = one.partitions
        await producer.send(topic, b"held", partition=place.partition)
        await until(lambda: len(taken) == 1)
        _, first = taken[0]
        await hang_fetching(one)
        await until(lambda: len(taken) >= 2, 15)
        assert not first.is_current()
        assert taken[1][1].record.offset == first.record.offset
        assert taken[1][1].is_takeover
        assert taken[1][1].generation > first.generation
        for worker in (one, two):
            await worker.stop(drain_s=0)
    await producer.close()


@asynccontextmanager
async def own_kafka(folder: Path) -> AsyncIterator[tuple[EmbeddedKafka, Callable[[signal.Signals], None]]]:
    """A broker that may be frozen: it accepts connections, and answers nothing."""
    kafka = EmbeddedKafka(folder)
    try:
        await kafka.start()
    except MissingPrerequisiteError as error:
        pytest.skip(str(error))
    assert kafka.handle is not None
    pid = kafka.handle.pid

    def tell(number: signal.Signals) -> None:
        os.kill(pid, number)

    try:
        yield kafka, tell
    finally:
        tell(signal.SIGCONT)
        await kafka.stop()


async def test_the_lease_ends_while_a_broker_is_silent_and_work_goes_on_after(tmp_path: Path) -> None:
    async with (
        own_kafka(tmp_path) as (kafka, tell),
        KafkaBroker(BrokerSettings(bootstrap=kafka.bootstrap), TIMEOUTS) as broker,
    ):
        topic = await create(broker)
        producer = await broker.producer()
        deliveries: list[Delivery] = []
        go_on = asyncio.Event()

        async def work(delivery: Delivery) -> None:
            deliveries.append(delivery)
            await go_on.wait()

        async with Worker(broker, topic, "a", work=work) as worker:
            await producer.send(topic, b"1", partition=0)
            await until(lambda: len(deliveries) == 1)
            assert deliveries[0].is_leased()
            tell(signal.SIGSTOP)
            frozen_at = time.monotonic()
            await until(lambda: not deliveries[0].is_leased(), 5)
            assert time.monotonic() - frozen_at < TIMEOUTS.session_ms / 1000
            assert deliveries[0].is_current(), "what runs goes on"
            tell(signal.SIGCONT)
            await until(lambda: deliveries[-1].is_leased())
            go_on.set()
            await producer.send(topic, b"2", partition=0)
            await until(lambda: {offset for _, offset in worker.done} == {0, 1})
        await producer.close()


@pytest.mark.parametrize(
    "timeouts", [pytest.param(TIMEOUTS, marks=pytest.mark.soak), Timeouts()], ids=["short", "default"]
)
async def test_a_broker_that_answers_nothing_at_the_stop_holds_it_up_for_seconds_only(
    tmp_path: Path, timeouts: Timeouts
) -> None:
    async with own_kafka(tmp_path) as (kafka, tell):
        broker = KafkaBroker(BrokerSettings(bootstrap=kafka.bootstrap), timeouts)
        topic = await create(broker)
        producer = await broker.producer()

        async def work(_: Delivery) -> None:
            await asyncio.Event().wait()

        worker = Worker(broker, topic, "a", work=work)
        await worker.__aenter__()
        for number in range(3):
            await producer.send(topic, b"%d" % number, partition=0)
        await until(lambda: worker.consumer.statistics().num_in_flight == 3)
        tell(signal.SIGSTOP)
        sending = asyncio.create_task(producer.send(topic, b"late", partition=0))
        began = time.monotonic()
        await worker.stop(drain_s=0.5)
        await producer.close()
        await broker.__aexit__(None, None, None)
        assert time.monotonic() - began < 45  # some 15 s on a quiet machine
        with pytest.raises(BrokerUnavailableError):
            await sending
        print(f"\nstopped in {time.monotonic() - began:.1f} s")  # noqa: T201


async def test_how_long_a_join_and_a_leave_hold_the_others_up(
    broker: KafkaBroker, capsys: pytest.CaptureFixture[str]
) -> None:
    """The longest gap between two hand-outs of a partition that stays where it is, over joins and leaves."""
    topic = await create(broker, 4)
    producer = await broker.producer()
    gaps = []
    async with Worker(broker, topic, "a") as worker, stream(producer, topic, 4, 0.002):
        await until(lambda: len(worker.handed_at) > 50)
        for _ in range(5):
            worker.handed_at.clear()
            async with Worker(broker, topic, "b") as other:
                await until(lambda: len(other.done) > 20)
            await until(lambda: len(worker.partitions) == 4)
            await until(lambda: len(worker.handed_at) > 100)
            times = list(worker.handed_at)
            gaps.append(max(after - before for before, after in pairwise(times)))
    await producer.close()
    with capsys.disabled():
        shown = ", ".join(f"{gap * 1000:.0f}" for gap in sorted(gaps))
        print(f"\nrebalance pause at a heartbeat of {TIMEOUTS.heartbeat_ms} ms: {shown} ms")  # noqa: T201
    assert max(gaps) < 2.0
