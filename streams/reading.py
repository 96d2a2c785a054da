"""Reading partitions to an end that was asked for before: what is written meanwhile does not move it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

from streams.broker import LogReader, Record, TopicPartition


async def read_until(
    reader: LogReader, ends: Mapping[TopicPartition, int], *, timeout_ms: int, max_records: int = 500
) -> AsyncIterator[Sequence[Record]]:
    """Yield what each poll returns until no partition stands before its end offset.

    A poll may return nothing, so that the caller can give up, and the last ones records at or behind an end.
    """
    while any(reader.position(place) < end for place, end in ends.items()):
        yield await reader.poll(timeout_ms=timeout_ms, max_records=max_records)
