"""Reads the token stream of a request from its place in the log until the effective end.

Follows `see` records to where the stream really stands, goes on after the broker was away, and skips what cannot be
decoded (a missing token shows as a gap anyway). It does not decide which records count; `streams.claims` does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from schemas.codec import unpack
from schemas.envelope import TOKEN_TYPE, Reply, check_type
from schemas.errors import (
    BrokerUnavailableError,
    DecodeError,
    InvalidRequestError,
    ResponseTimeoutError,
    StreamError,
    StreamGapError,
    UnsupportedVersionError,
)
from schemas.tokens import TOKEN_RECORD_VERSION, Kind, See, TokenRecord
from streams.broker import Broker, LogReader, Record, TopicPartition
from streams.claims import StreamView
from streams.stream_events import Event, StreamSeen, TextAppended

MAX_JUMPS = 8  # a chain of repeats is one or two long; more is a loop that someone wrote
MAX_INDEX = 7  # n is at most 8
POLL_S = 1.0
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 2.0


class Inbox(Protocol):
    """Where the records of one request arrive from a shared reader (`streams.stream_hub`)."""

    @property
    def is_overflowed(self) -> bool:
        """Return whether records were dropped: read on by yourself."""
        ...

    async def poll(self, timeout_s: float) -> Sequence[Record]:
        """Return what has arrived; may be empty."""
        ...

    def close(self) -> None:
        """Take nothing more. Idempotent."""
        ...


def decode_token(record: Record) -> TokenRecord:
    """Decode one record of a token topic.

    Raises DecodeError or InvalidRequestError (UnsupportedVersionError for another version).
    """
    check_type(record.headers, TOKEN_TYPE)
    token = unpack(record.value, TokenRecord)
    if token.v != TOKEN_RECORD_VERSION:
        raise UnsupportedVersionError(f"v: {token.v} is not known here", field="v")
    if not 0 <= token.index <= MAX_INDEX or token.seq < 0:
        raise DecodeError(f"choice {token.index}, seq {token.seq}: out of range")
    body = {Kind.CLAIM: token.claim, Kind.SEE: token.see, Kind.END: token.end}
    if token.kind in body and body[token.kind] is None:
        raise DecodeError(f"a record of kind {token.kind} without its body")
    return token


class StreamReader:
    """One request's stream, as events. `view` is its state; `close` it, or use `read_stream`."""

    def __init__(
        self,
        broker: Broker,
        request_id: str,
        place: TopicPartition,
        start: int,
        *,
        inbox: Inbox | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.view = StreamView()
        self.place = place
        self.next_offset = start
        self.num_undecodable = 0
        self.first_text_ms = 0
        """When the first text was written, a Unix time of the log; 0 before any."""
        self.last_failure: BrokerUnavailableError | None = None
        """Why the broker was away at the last poll; None if it answered."""
        self._broker = broker
        self._request_id = request_id
        self._key = request_id.encode()
        self._inbox = inbox
        self._reader: LogReader | None = None
        self._clock = clock
        self._backoff_s = FIRST_BACKOFF_S
        self._visited = {(place, start)}
        self._is_moved = False
        self._may_be_midway = inbox is not None
        """Whether what was sent may be a repeat whose stream runs already: then a reference to its start is to come."""
        self._failure: StreamError | None = None

    async def next_events(self, timeout_s: float, *, until: int | None = None) -> tuple[Event, ...]:
        """Return the next events, empty if none came in time or below offset `until`. Safe to cancel.

        A broker that is away is tried again until the time is up. Raises StreamGapError, StreamExpiredError.
        """
        deadline = self._clock() + timeout_s
        while not self.view.is_ended:
            if self._failure is not None:
                raise self._failure
            events = self._apply(await self._poll(max(0.0, deadline - self._clock())))
            if events or self._clock() >= deadline or (until is not None and self.next_offset >= until):
                return events
        return ()

    async def read_until(self, offset: int, timeout_s: float) -> None:
        """Bring `view` to the records below `offset`. Raises BrokerUnavailableError if that takes too long."""
        deadline = self._clock() + timeout_s
        while self.next_offset < offset and not self.view.is_ended:
            if self._failure is not None:
                raise self._failure
            self._apply(await self._poll(max(0.0, deadline - self._clock())), below=offset)
            if self.next_offset < offset and self._clock() >= deadline:
                raise BrokerUnavailableError(f"the log could not be read up to {offset} in {timeout_s:g} s")

    async def close(self) -> None:
        """Release the reader. Idempotent."""
        if self._inbox is not None:
            self._inbox.close()
        reader, self._reader = self._reader, None
        if reader is not None:
            await reader.close()

    async def _poll(self, timeout_s: float) -> Sequence[Record]:
        if self._inbox is not None and not self._inbox.is_overflowed:
            return await self._inbox.poll(min(timeout_s, POLL_S))
        try:
            if self._is_moved:
                await self.close()
                self._is_moved = False
            if self._reader is None:
                self._reader = await self._broker.reader({self.place: self.next_offset})
            records = await self._reader.poll(timeout_ms=int(min(timeout_s, POLL_S) * 1000))
        except BrokerUnavailableError as error:
            self.last_failure = error
            await self.close()
            await asyncio.sleep(min(timeout_s, self._backoff_s))
            self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)
            return ()
        self.last_failure = None
        self._backoff_s = FIRST_BACKOFF_S
        return records

    def _apply(self, records: Sequence[Record], below: int | None = None) -> tuple[Event, ...]:
        events: list[Event] = []
        for record in records:
            is_wanted = record.place == self.place and record.offset >= self.next_offset
            if not is_wanted or (below is not None and record.offset >= below):
                continue
            self.next_offset = record.offset + 1
            try:
                for event in self._events_of(record):
                    if not isinstance(event, StreamSeen):
                        self._may_be_midway = False
                        events.append(event)
                    elif below is None:  # an owner that reads its own stream does not leave it
                        self._jump(event.see)
            except StreamError as error:
                self._failure = error  # what came before it is handed out first
            if self._failure is not None or self._is_moved:
                break
        if self._failure is not None and not events:
            raise self._failure
        return tuple(events)

    def _events_of(self, record: Record) -> tuple[Event, ...]:
        if record.key != self._key:
            return ()
        try:
            token = decode_token(record)
        except (DecodeError, InvalidRequestError):
            self.num_undecodable += 1
            return ()
        try:
            events = self.view.apply(token, record.offset)
        except StreamGapError:
            if not self._may_be_midway:
                raise
            self.view = StreamView()  # a run that goes on with what was written before we came
            return ()
        if token.see is not None and self._may_be_midway:
            return (StreamSeen(see=token.see),)
        if not self.first_text_ms and any(isinstance(event, TextAppended) for event in events):
            self.first_text_ms = record.timestamp_ms
        return events

    def _jump(self, see: See) -> None:
        """Go on at another place, unless we have been there: then the stream is yet to come here."""
        place = TopicPartition(see.topic, see.partition)
        if (place, see.offset) in self._visited:
            return
        if len(self._visited) > MAX_JUMPS:
            raise StreamError(f"request {self._request_id}: more than {MAX_JUMPS} references to follow")
        self._visited.add((place, see.offset))
        if self._inbox is not None:
            self._inbox.close()
            self._inbox = None
        self.view, self._may_be_midway = StreamView(), False
        self.place, self.next_offset = place, see.offset
        self._is_moved = True


async def read_stream(
    broker: Broker,
    topic: str,
    partition: int,
    start: int,
    request_id: str,
    *,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Event]:
    """Yield the events of a stream from offset `start` until its end.

    Raises ResponseTimeoutError after `timeout_s` in all, StreamGapError, StreamExpiredError.
    """
    reader = StreamReader(broker, request_id, TopicPartition(topic, partition), start, clock=clock)
    deadline = clock() + timeout_s
    try:
        while not reader.view.is_ended:
            events = await reader.next_events(max(0.0, deadline - clock()))
            for event in events:
                yield event
            if not events and clock() >= deadline:
                raise ResponseTimeoutError(f"request {request_id}: no end in {timeout_s:g} s", request_id=request_id)
    finally:
        await reader.close()


async def read_view(broker: Broker, reply: Reply, request_id: str, *, until: int, timeout_s: float) -> StreamView:
    """Return the stream as it stands in the records below offset `until`; for a take-over, one after its claim.

    Raises BrokerUnavailableError, StreamGapError, StreamExpiredError.
    """
    reader = StreamReader(broker, request_id, TopicPartition(reply.topic, reply.partition), reply.start)
    try:
        await reader.read_until(until, timeout_s)
    finally:
        await reader.close()
    return reader.view
