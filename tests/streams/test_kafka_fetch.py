"""Records that aiokafka cannot read, with its own fetcher over batches that stand in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka.consumer.fetcher import READ_UNCOMMITTED, FetchResult, PartitionRecords
from aiokafka.record.default_records import DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c
from aiokafka.structs import TopicPartition

from streams.broker import Record
from streams.kafka_fetch import Fetch

PLACES = [TopicPartition("t", number) for number in range(3)]


NAME = "no-utf-8"


def poisoned(raw: bytes) -> bytes:
    """Make every header name of a batch bytes that are no UTF-8, as a client in C can write them."""
    changed = bytearray(raw.replace(NAME.encode(), b"\xff" * len(NAME)))
    changed[17:21] = calc_crc32c(changed[21:]).to_bytes(4, "big")  # the checksum covers what follows it
    return bytes(changed)


def batch(bad: Sequence[int], count: int = 5) -> bytes:
    builder = DefaultRecordBatchBuilder(2, 0, 0, -1, -1, 0, 1_000_000)
    for number in range(count):
        headers = [(NAME, b"1")] if number in bad else []
        builder.append(number, timestamp=1, key=None, value=b"%d" % number, headers=headers)
    return poisoned(bytes(builder.build()))


class Log:
    """Stands in for the fetcher's network side: what `getmany` asks for is there."""

    def __init__(self, client: AIOKafkaConsumer, batches: dict[TopicPartition, bytes]) -> None:
        self._client = client
        self._batches = batches
        self._records: dict[TopicPartition, FetchResult] = {}

    async def fetched_records(self, partitions: Any, timeout: float, max_records: int) -> dict[Any, list[Any]]:
        assignment = self._client._subscription.subscription.assignment
        drained: dict[Any, list[Any]] = {}
        for place, raw in self._batches.items():
            position = assignment.state_value(place).position
            if place not in self._records and position < 5:
                read = PartitionRecords(place, MemoryRecords(raw), [], position, None, None, True, READ_UNCOMMITTED)
                self._records[place] = FetchResult(place, assignment=assignment, partition_records=read, backoff=0)
        for place in list(self._records):  # as in Fetcher.fetched_records
            if max_records - sum(map(len, drained.values())) <= 0:
                break
            found = self._records[place].getall(max_records - sum(map(len, drained.values())))
            if not self._records[place].has_more():
                del self._records[place]
            if found:
                drained[place] = found
        return drained


async def read_all(bad: dict[int, Sequence[int]], max_records: int) -> list[Record]:
    client = AIOKafkaConsumer(auto_offset_reset="earliest")
    client.assign(PLACES)
    for place in PLACES:
        client._subscription.subscription.assignment.state_value(place).reset_to(0)
    client._fetcher = Log(client, {place: batch(bad.get(place.partition, ())) for place in PLACES})
    client.getmany = lambda timeout_ms, max_records: client._fetcher.fetched_records((), 0, max_records)
    client._fetcher.seek_to = lambda place, offset: None
    client.seek = lambda place, offset: (
        client._fetcher._records.pop(place, None),
        client._subscription.seek(place, offset),
    )
    fetch = Fetch(client)
    records: list[Record] = []
    for _ in range(100):
        records.extend(await fetch(0, max_records))
        if len(records) >= 15:
            break
    client._closed = True  # it was never started
    return records


@pytest.mark.parametrize("max_records", [1, 2, 7, 100])
@pytest.mark.parametrize("bad", [{}, {0: [2]}, {2: [0]}, {1: [4]}, {0: [0, 1], 1: [4], 2: [2, 3]}, {0: range(5)}])
async def test_nothing_beside_an_unreadable_record_is_lost_or_read_twice(
    bad: dict[int, Sequence[int]], max_records: int
) -> None:
    records = await read_all(bad, max_records)
    for number in range(3):
        mine = [record for record in records if record.partition == number]
        assert [record.offset for record in mine] == [0, 1, 2, 3, 4]
        first_bad = min(bad.get(number, ()), default=5)
        expected = [b"%d" % at if at < first_bad else None for at in range(5)]  # one batch, read from its beginning
        assert [record.value for record in mine] == expected
