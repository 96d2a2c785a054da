"""GEA's consumer and producer as a process of the comparison: the same loop as in a worker, around plain work."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

from streams.broker import Producer
from streams.consumer import PoolConsumer
from streams.delivery import Delivery
from streams.kafka import KafkaBroker
from streams.settings import BrokerSettings, ConsumerLimits


async def work(value: bytes) -> None:
    """Do what an item asks for: its first field is a time in microseconds."""
    duration_us = int(value.partition(b":")[0])
    if duration_us:
        await asyncio.sleep(duration_us / 1_000_000)


async def handle(delivery: Delivery, producer: Producer, output: str) -> None:
    """Work, write the result, and only then acknowledge."""
    record = delivery.record
    await work(record.value or b"0")
    await producer.send(output, record.value, key=record.key)
    delivery.done()


async def run(bootstrap: str, topic: str, group: str, output: str, in_flight: int) -> None:
    """Read `topic`, work, write to `output`, until killed."""
    limits = ConsumerLimits(
        batch_size=min(in_flight, 64), max_wait_ms=0, max_in_flight=in_flight, window=16 * in_flight
    )

    def begin(batch: Sequence[Delivery]) -> None:
        for delivery in batch:
            delivery.attach(asyncio.create_task(handle(delivery, producer, output)))  # held by its partition

    async with KafkaBroker(BrokerSettings(bootstrap=bootstrap, client_id="bench")) as broker:
        producer = await broker.producer()
        async with PoolConsumer(broker, [topic], group=group, member="bench-1", limits=limits) as consumer:
            async for batch in consumer.batches():
                begin(batch)


if __name__ == "__main__":
    where_is_kafka, source, member_of, target, number = sys.argv[1:]
    asyncio.run(run(where_is_kafka, source, member_of, target, int(number)))
