"""The dead-letter topic for operators: letters by filter, as they stand, and which of them were sent in again.

Knows letters and where they came from, not how they are shown or redriven. Reads page by page up to the end at the
start: memory does not grow with the topic, and what is put aside meanwhile is not seen.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from schemas.codec import unpack
from schemas.envelope import CE_TYPE, REDRIVEN_FROM, REDRIVEN_TYPE, TENANT, Headers
from schemas.errors import DecodeError, InvalidRequestError
from schemas.failure import DeadLetter, Redriven
from streams.broker import Broker, Record, TopicPartition
from streams.reading import read_until
from streams.topics import DEAD_LETTER

PAGE = 100
POLL_MS = 500
MAX_IDLE_POLLS = 20  # 10 s without a record that must be there
ID_SUFFIX = ":redrive-"  # of the id of a request that was redriven, before the place of its letter


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A letter and its place in the dead-letter topic."""

    partition: int
    offset: int
    size: int
    letter: DeadLetter

    @property
    def place(self) -> str:
        """Return the place as `partition:offset`."""
        return f"{self.partition}:{self.offset}"

    @property
    def tenant(self) -> str:
        """Return whose record it was; what names nobody belongs to the default tenant."""
        return last_header(self.letter.headers, TENANT) or "default"

    @property
    def redriven_from(self) -> str:
        """Return the place of the letter that this record was redriven from, empty if it was not."""
        _, _, suffix = self.letter.request_id.partition(ID_SUFFIX)
        return last_header(self.letter.headers, REDRIVEN_FROM) or suffix.replace("-", ":")


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Which letters are meant: all that fit every field that is set. Times are Unix milliseconds of the failure."""

    code: str | None = None
    topic: str | None = None
    request_id: str | None = None
    tenant: str | None = None
    since_ms: int | None = None
    until_ms: int | None = None
    places: frozenset[str] = frozenset()

    @property
    def is_explicit(self) -> bool:
        """Return whether anything narrows the choice."""
        return self != LetterFilter()

    def fits(self, stored: Stored) -> bool:
        """Return whether a letter is meant."""
        letter = stored.letter
        return (
            self.code in (None, letter.code)
            and self.topic in (None, letter.topic)
            and self.request_id in (None, letter.request_id)
            and self.tenant in (None, stored.tenant)
            and (self.since_ms is None or self.since_ms <= letter.failed_ms)
            and (self.until_ms is None or letter.failed_ms < self.until_ms)
            and (not self.places or stored.place in self.places)
        )


class DeadLetterLog:
    """The topic as it stands now: what comes later is not seen. `num_unreadable` counts records that are no letters."""

    def __init__(
        self, broker: Broker, ends: Mapping[TopicPartition, int], begins: Mapping[TopicPartition, int]
    ) -> None:
        self._broker = broker
        self._ends = ends
        self._begins = begins
        self.num_unreadable = 0

    @classmethod
    async def open(cls, broker: Broker) -> DeadLetterLog:
        """Look where the topic begins and ends. Raises InvalidRequestError if there is none."""
        num_partitions = await broker.partitions(DEAD_LETTER)
        if not num_partitions:
            raise InvalidRequestError(f"there is no topic {DEAD_LETTER}: `gea topics apply` creates it")
        reader = await broker.reader({TopicPartition(DEAD_LETTER, number): 0 for number in range(num_partitions)})
        try:
            return cls(broker, begins=await reader.begin_offsets(), ends=await reader.end_offsets())
        finally:
            await reader.close()

    async def letters(self, wanted: LetterFilter) -> AsyncIterator[Stored]:
        """Yield the letters that fit, in order per partition."""
        self.num_unreadable = 0
        async for record in self._records():
            if last_header(record.headers, CE_TYPE) == REDRIVEN_TYPE:
                continue
            try:
                letter = unpack(record.value, DeadLetter)
            except (DecodeError, InvalidRequestError):
                self.num_unreadable += 1
                continue
            size = len(record.value or b"")
            stored = Stored(partition=record.partition, offset=record.offset, size=size, letter=letter)
            if wanted.fits(stored):
                yield stored

    async def redriven(self) -> dict[str, Redriven]:
        """Return which letters were sent in again, by their place."""
        found = {}
        async for record in self._records():
            if last_header(record.headers, CE_TYPE) == REDRIVEN_TYPE:
                try:
                    note = unpack(record.value, Redriven)
                except (DecodeError, InvalidRequestError):
                    continue
                found[f"{record.partition}:{note.offset}"] = note
        return found

    async def _records(self) -> AsyncIterator[Record]:
        places = {place: begin for place, begin in self._begins.items() if begin < self._ends[place]}
        if not places:
            return
        ends = {place: self._ends[place] for place in places}
        reader = await self._broker.reader(places)
        num_idle = 0
        try:
            async for records in read_until(reader, ends, timeout_ms=POLL_MS, max_records=PAGE):
                num_idle = 0 if records else num_idle + 1
                if num_idle >= MAX_IDLE_POLLS:
                    raise InvalidRequestError(f"{DEAD_LETTER} could not be read to its end")
                for record in records:
                    if record.offset < ends[record.place]:
                        yield record
        finally:
            await reader.close()


async def restore(broker: Broker, stored: Stored) -> Stored:
    """Return the letter with what was left out of it, if its record still stands where it came from."""
    letter = stored.letter
    place = TopicPartition(letter.topic, letter.partition)
    if not letter.is_left_out or place.partition >= await broker.partitions(place.topic):
        return stored
    reader = await broker.reader({place: letter.offset})
    try:
        if not (await reader.begin_offsets())[place] <= letter.offset < (await reader.end_offsets())[place]:
            return stored
        records = await reader.poll(timeout_ms=MAX_IDLE_POLLS * POLL_MS, max_records=1)
    finally:
        await reader.close()
    if not records or records[0].offset != letter.offset:
        return stored
    found = records[0]
    whole = msgspec.structs.replace(letter, value=found.value, key=found.key, headers=found.headers, is_left_out=False)
    return replace(stored, letter=whole)


def last_header(headers: Headers, name: str) -> str:
    """Return a header as text, whatever bytes it holds; empty if it is absent."""
    values = [value for key, value in headers if key == name]
    return values[-1].decode(errors="replace") if values else ""
