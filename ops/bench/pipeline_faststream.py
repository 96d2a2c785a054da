"""FastStream as a process of the comparison. Runs in the peers' own environment: needs FastStream and nothing of ours.

Both ways by which FastStream works at least once. `workers`: one aiokafka consumer for each of `max_workers`, which is
as many as there are partitions, because within a partition messages are handled one after another there; each message
is acknowledged alone. `batch`: up to `max_records` messages at once, handled together and acknowledged together.
"""

from __future__ import annotations

import asyncio
import sys

from faststream import AckPolicy, FastStream
from faststream.kafka import KafkaBroker


async def work(value: bytes) -> None:
    """Do what an item asks for: its first field is a time in microseconds."""
    duration_us = int(value.partition(b":")[0])
    if duration_us:
        await asyncio.sleep(duration_us / 1_000_000)


def main(bootstrap: str, topic: str, group: str, output: str, mode: str, in_flight: int) -> None:
    """Read `topic`, work, write to `output`, until killed."""
    broker = KafkaBroker(bootstrap, acks="all", apply_types=False, logger=None)

    async def handle(value: bytes) -> None:
        await work(value)
        await broker.publish(value, output)

    async def handle_all(values: list[bytes]) -> None:
        await asyncio.gather(*map(handle, values))

    options = {"group_id": group, "auto_offset_reset": "earliest", "ack_policy": AckPolicy.ACK}
    if mode == "workers":
        broker.subscriber(topic, max_workers=in_flight, **options)(handle)
    else:
        broker.subscriber(topic, batch=True, max_records=in_flight, **options)(handle_all)
    asyncio.run(FastStream(broker, logger=None).run())


if __name__ == "__main__":
    where_is_kafka, source, member_of, target, way, number = sys.argv[1:]
    main(where_is_kafka, source, member_of, target, way, int(number))
