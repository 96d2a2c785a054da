"""Takes a request over that another run may have begun: claim → read → ours, ended, or another run's.

Knows the log and its claims, no prompts and no engine. The invariant: who is told to go on owns the request, and has
read everything that counts before its claim.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import structlog

from schemas.envelope import RoutedRequest
from schemas.errors import BrokerUnavailableError, RequestCancelledError, StreamError
from streams.broker import Broker, TopicPartition
from streams.claims import StreamView
from streams.token_reader import StreamReader
from streams.token_writer import TokenWriter
from workers.generation.cancelling import unless, unless_cancelled
from workers.wanted import seconds_left

READ_TIMEOUT_S = 30.0
GRACE_S = 1.0  # how long a run that lives has to end its stream, once its deadline has passed or it is cancelled

log = structlog.get_logger(__name__)


class OutrankedError(Exception):
    """A record of the same request whose run has a higher epoch is here: it takes this one's place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What stands before our claim: the stream so far, and the Unix time in milliseconds of its first text, else 0."""

    view: StreamView = field(default_factory=StreamView)
    first_text_ms: int = 0

    @property
    def has_text(self) -> bool:
        """Return whether readers have anything of an answer."""
        return any(self.view.text(index) or self.view.next_seq(index) for index in self.view.indexes)


async def take_over(
    writer: TokenWriter,
    broker: Broker,
    routed: RoutedRequest,
    cancelled: asyncio.Event,
    *,
    outranked: asyncio.Event,
    lease_s: float,
) -> Found | None:
    """Claim a request and return what `writer` goes on from; None once the request has ended.

    A stream that cannot be read is voided. While another run's claim counts instead of ours: raises OutrankedError if a
    record turns up here (`outranked`) whose claim will count; BrokerUnavailableError, so that the
    request is re-produced, if that other run is silent for `lease_s`, or does not end the request when it should.
    """
    offset = await writer.claim()
    if routed.reply.start > offset:  # its topic was made anew, or the request never came through a router
        log.warning("stream_start_ahead", start=routed.reply.start, claim=offset)
        await writer.reset()
        return Found()
    place = TopicPartition(routed.reply.topic, routed.reply.partition)
    reader = StreamReader(broker, routed.request_id, place, routed.reply.start)
    try:
        try:
            await reader.read_until(offset + 1, READ_TIMEOUT_S)
        except StreamError as error:
            log.warning("stream_unreadable", code=error.code, reason=error.message)
            await writer.reset()
            return Found()
        if reader.view.is_ended:
            return None
        if reader.view.is_owned_by(writer.epoch, writer.owner):
            writer.resume(reader.view)
            return Found(view=reader.view, first_text_ms=reader.first_text_ms)
        await reader.close()  # it has read on: the records behind our claim are still to come
        await unless(outranked, _await_winner(reader, routed, cancelled, lease_s), OutrankedError())
        return None
    finally:
        await reader.close()


async def _await_winner(reader: StreamReader, routed: RoutedRequest, cancelled: asyncio.Event, lease_s: float) -> None:
    """Wait for the end of another run; one that is cancelled has little time left."""
    try:
        try:
            await unless_cancelled(cancelled, _await_end(reader, routed, lease_s))
        except RequestCancelledError:
            await _await_end(reader, routed, min(lease_s, GRACE_S))
    except StreamError as error:
        raise BrokerUnavailableError(f"the stream of another run cannot be read: {error.message}") from error


async def _await_end(reader: StreamReader, routed: RoutedRequest, lease_s: float) -> None:
    while not reader.view.is_ended:
        patience_s = min(lease_s, seconds_left(routed) + GRACE_S)
        if not await reader.next_events(patience_s):
            raise BrokerUnavailableError(f"another run has been silent for {patience_s:.3g} s")
