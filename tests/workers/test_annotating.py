"""A batch of an annotating pool: what each of its requests may do alone."""

from __future__ import annotations

import asyncio

import msgspec

from schemas.codec import pack, unpack
from schemas.envelope import RoutedRequest
from schemas.worker import Pool
from streams.broker import Record
from streams.cancellations import Cancellations
from streams.delivery import Delivery, Ownership
from streams.memory import MemoryBroker
from streams.topics import pool_topic, topic_specs
from tests.flow.harness import FixedAnnotator, with_intent
from tests.streams.token_fakes import until
from tests.workers.routed import ROUTED
from workers.annotating import AnnotatingHandler
from workers.outbox import Outbox

INTENT, RETRIEVAL = pool_topic(Pool.INTENT, "blue"), pool_topic(Pool.RETRIEVAL, "blue")


class Batch:
    """Deliveries of two partitions, and a handler whose annotator waits at a gate."""

    def __init__(self, broker: MemoryBroker, outbox: Outbox) -> None:
        self.broker = broker
        self.annotator = FixedAnnotator(Pool.INTENT, with_intent)
        self.annotator.gate.clear()
        self.cancellations = Cancellations()
        self.handler = AnnotatingHandler(self.annotator, outbox, cancellations=self.cancellations)
        self.owned = [Ownership(1, 0, lambda: True) for _ in range(2)]
        self.done: list[str] = []

    def delivery(self, request_id: str, partition: int) -> Delivery:
        routed = msgspec.structs.replace(ROUTED, request_id=request_id)
        record = Record(
            topic=INTENT, partition=partition, offset=0, timestamp_ms=0, key=b"k", value=pack(routed), headers=()
        )
        self.owned[partition].tracker.start(0)
        return Delivery(record, self.owned[partition], 0.0, lambda _: self.done.append(request_id))

    def forwarded(self) -> list[str]:
        records = self.broker.records(RETRIEVAL)
        return [unpack(record.value, RoutedRequest).request_id for record in records]


async def batch() -> Batch:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(2))
    return Batch(broker, Outbox(await broker.producer(), worker_id="w-1", num_token_partitions=2))


async def test_requests_of_a_lost_partition_leave_the_batch_and_the_others_go_on() -> None:
    made = await batch()
    handling = asyncio.create_task(made.handler.handle([made.delivery("lost", 0), made.delivery("ours", 1)]))
    await until(lambda: made.annotator.batches == [2])
    made.owned[0].lose()
    made.annotator.gate.set()
    await handling
    assert made.forwarded() == ["ours"]
    assert made.done == ["ours"]


async def test_a_batch_that_is_lost_altogether_is_given_up() -> None:
    made = await batch()
    handling = asyncio.create_task(made.handler.handle([made.delivery("lost", 0)]))
    await until(lambda: made.annotator.batches == [1])
    made.owned[0].lose()
    async with asyncio.timeout(5):
        await handling
    assert (made.annotator.num_given_up, made.forwarded(), made.done) == (1, [], [])


async def test_a_handler_that_is_cancelled_leaves_its_records_to_the_next_owner_and_no_task() -> None:
    made = await batch()
    handling = asyncio.create_task(made.handler.handle([made.delivery("r-1", 0), made.delivery("r-2", 1)]))
    await until(lambda: made.annotator.batches == [2])
    handling.cancel()
    await asyncio.gather(handling, return_exceptions=True)
    assert (made.annotator.num_given_up, made.forwarded(), made.done) == (1, [], [])
    assert len(asyncio.all_tasks()) == 1
    assert made.cancellations.statistics()["watched"] == 0
