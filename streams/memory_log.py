"""The partitions of the in-memory broker: append, read, compact, expire. Knows no groups and no waiting."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from schemas.envelope import Headers
from schemas.errors import InvalidRequestError, StreamExpiredError
from streams.broker import Record, TopicPartition

MAX_MESSAGE_BYTES = 1_048_588  # Kafka's default of max.message.bytes


class MemoryPartition:
    """One partition: records in the order of their offsets, with gaps where compaction removed some."""

    def __init__(self, place: TopicPartition, max_message_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self.begin = 0
        self.end = 0
        self._place = place
        self._max_message_bytes = max_message_bytes
        self._records: list[Record] = []

    def append(self, timestamp_ms: int, key: bytes | None, value: bytes | None, headers: Headers) -> Record:
        """Append one record. Raises InvalidRequestError for one that is too large."""
        num_bytes = len(key or b"") + len(value or b"") + sum(len(name) + len(text) for name, text in headers)
        if num_bytes > self._max_message_bytes:
            raise InvalidRequestError(f"record of {num_bytes} bytes: at most {self._max_message_bytes} are allowed")
        record = Record(
            topic=self._place.topic,
            partition=self._place.partition,
            offset=self.end,
            timestamp_ms=timestamp_ms,
            key=key,
            value=value,
            headers=headers,
        )
        self._records.append(record)
        self.end += 1
        return record

    def read(self, offset: int, max_records: int) -> Sequence[Record]:
        """Return records from `offset` on. Raises StreamExpiredError for an offset outside the log."""
        if not self.begin <= offset <= self.end:
            raise StreamExpiredError(f"{self._place}: offset {offset} is not in {self.begin} to {self.end}")
        start = self._index(offset)
        return self._records[start : start + max_records]

    def compact(self) -> None:
        """Keep the last record of each key, and those without a key."""
        last = {record.key: record.offset for record in self._records}
        self._records = [r for r in self._records if r.key is None or last[r.key] == r.offset]

    def expire(self, before: int) -> None:
        """Remove every record below offset `before`."""
        self.begin = max(self.begin, min(before, self.end))
        self._records = self._records[self._index(self.begin) :]

    def _index(self, offset: int) -> int:
        return bisect_left(self._records, offset, key=lambda record: record.offset)
