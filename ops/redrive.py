"""What a dead letter is sent in again as.

A letter that holds a request goes in at the front door under an id of its own, made of the old id and the letter's
place: a redrive that is repeated is a repeat of that request, and is answered once. Other letters go back as they came
to where they came from. Each redrive is noted beside its letter. Knows nothing of filters or terminals.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum

from ops.dlq import ID_SUFFIX, DeadLetterLog, LetterFilter, Stored, restore
from schemas.codec import pack, unpack
from schemas.envelope import (
    CE_TYPE,
    CONTENT_TYPE,
    DEADLINE_MS,
    MSGPACK,
    NOT_BEFORE_MS,
    REDRIVEN_FROM,
    REDRIVEN_TYPE,
    REPLY_PARTITION,
    REPLY_TOPIC,
    REQUEST_ID,
    REQUEST_TYPE,
    TARGET,
    TENANT,
    TRACEPARENT,
    Headers,
    RoutedRequest,
)
from schemas.errors import DecodeError, GeaError, InvalidRequestError
from schemas.failure import Redriven
from schemas.request import ID_PATTERN
from streams.broker import Broker, Producer
from streams.clock import now_ms
from streams.topics import DEAD_LETTER, DOCUMENTS, REQUESTS, RETRY_DELAYS_S, ROUTES, TOKENS, WORKERS, is_pool_topic

MAX_ID_CHARS = 128
COMPACTED = (DOCUMENTS, WORKERS, ROUTES)
FORGOTTEN = (REQUEST_ID, DEADLINE_MS, REPLY_PARTITION, REDRIVEN_FROM, TARGET, NOT_BEFORE_MS)
"""Headers that do not survive: the new request has its own id, and with it its place, and time of its own."""


class CannotRedriveError(Exception):
    """A letter cannot be sent in again; the message says why."""


class Outcome(StrEnum):
    """What became of a letter."""

    SENT = "sent"
    """It was sent in again, or would have been."""
    SKIPPED = "skipped"
    """It was sent in before."""
    REFUSED = "refused"
    """It cannot be sent in again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One letter of a redrive. `topic` and `request_id` say as what it went, `reason` why it did not."""

    stored: Stored
    outcome: Outcome
    topic: str = ""
    request_id: str = ""
    reason: str = ""

    def text(self) -> str:
        """Return the step for people."""
        return " ".join(word for word in (self.topic, self.request_id, self.reason) if word)

    def to_json(self) -> dict[str, str]:
        """Return the step for a report."""
        return {
            "place": self.stored.place,
            "outcome": self.outcome.value,
            "redriven_from": self.stored.letter.request_id,
            "topic": self.topic,
            "request_id": self.request_id,
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Redrive:
    """What is produced for a letter; `request_id` is the new id, None for what is no request."""

    stored: Stored
    topic: str
    value: bytes | None
    key: bytes | None
    headers: Headers
    request_id: str | None = None


async def redrive_letters(
    broker: Broker,
    log: DeadLetterLog,
    wanted: LetterFilter,
    *,
    is_dry: bool = False,
    is_forced: bool = False,
    is_again: bool = False,
    limit: int | None = None,
) -> AsyncIterator[Step]:
    """Send in again what a filter finds, and tell each step. `limit` counts what is sent."""
    before = await log.redriven()
    producer = await broker.producer()
    num_sent = 0
    try:
        async for stored in log.letters(wanted):
            note = before.get(stored.place)
            if note is not None and not is_again:
                yield Step(
                    stored=stored,
                    outcome=Outcome.SKIPPED,
                    topic=note.topic,
                    request_id=note.request_id,
                    reason="before; --again repeats it",
                )
                continue
            step = await _redrive(broker, None if is_dry else producer, stored, is_forced)
            yield step
            num_sent += step.outcome is Outcome.SENT
            if num_sent == limit:
                return
    finally:
        await producer.close()


async def _redrive(broker: Broker, producer: Producer | None, stored: Stored, is_forced: bool) -> Step:
    """Plan and send one letter; only plan it without a producer."""
    try:
        planned = plan_redrive(await restore(broker, stored), is_forced=is_forced)
        if not await broker.partitions(planned.topic):
            raise CannotRedriveError(f"there is no topic {planned.topic}")
        if producer is not None:
            await send_redrive(producer, planned)
    except (CannotRedriveError, InvalidRequestError) as refusal:
        return Step(stored=stored, outcome=Outcome.REFUSED, reason=str(refusal))
    return Step(stored=stored, outcome=Outcome.SENT, topic=planned.topic, request_id=planned.request_id or "")


def plan_redrive(stored: Stored, *, is_forced: bool = False) -> Redrive:
    """Return what a letter is sent in again as.

    `is_forced` also sends what would most likely fail again. Raises CannotRedriveError.
    """
    letter = stored.letter
    if letter.is_left_out:
        raise CannotRedriveError("the value was left out, and its record has left the topic that it came from")
    if letter.topic == REQUESTS:
        return _public(stored, is_forced)
    if is_pool_topic(letter.topic) or letter.topic in RETRY_DELAYS_S:
        return _routed(stored)
    if letter.topic in COMPACTED and not is_forced:
        raise CannotRedriveError(f"{letter.topic} may hold a newer record of that key: --force sends it all the same")
    kept = tuple((name, value) for name, value in letter.headers if name != REDRIVEN_FROM)
    headers = (*kept, (REDRIVEN_FROM, stored.place.encode()))
    return Redrive(stored=stored, topic=letter.topic, value=letter.value, key=letter.key, headers=headers)


def _public(stored: Stored, is_forced: bool) -> Redrive:
    """As it came, so that what this version of ours cannot read is not lost on the way."""
    letter = stored.letter
    if letter.code == DecodeError.code and not is_forced:
        raise CannotRedriveError("it is undecodable and would come back here: --force sends it all the same")
    if letter.value is None:
        raise CannotRedriveError("it has no value")
    kept = tuple((name, value) for name, value in letter.headers if name not in FORGOTTEN)
    return _request(stored, letter.value, kept)


def _routed(stored: Stored) -> Redrive:
    """A request that was on its way: what the client asked, without what the stages added."""
    try:
        routed = unpack(stored.letter.value, RoutedRequest)
        value = pack(routed.request)
    except GeaError as error:
        raise CannotRedriveError(f"it holds no request that can be read: {error.message}") from error
    headers = [(CE_TYPE, REQUEST_TYPE.encode()), (CONTENT_TYPE, MSGPACK.encode()), (TENANT, routed.tenant.encode())]
    if routed.reply.topic != TOKENS:  # a tenant's own topic; the partition follows from the id
        headers.append((REPLY_TOPIC, routed.reply.topic.encode()))
    if routed.traceparent:
        headers.append((TRACEPARENT, routed.traceparent.encode()))
    key = (routed.request.session_id or "").encode()
    return _request(stored, value, tuple(headers), key=key or None, old_id=routed.request_id)


def _request(
    stored: Stored, value: bytes, headers: Headers, *, key: bytes | None = None, old_id: str | None = None
) -> Redrive:
    letter = stored.letter
    old_id = letter.request_id if old_id is None else old_id
    request_id = redriven_id(old_id, stored)
    if key is None:
        is_session = letter.topic == REQUESTS and letter.key not in (None, old_id.encode())
        key = letter.key if is_session else request_id.encode()
    own: Headers = ((REQUEST_ID, request_id.encode()), (REDRIVEN_FROM, stored.place.encode()))
    return Redrive(stored=stored, topic=REQUESTS, value=value, key=key, headers=(*headers, *own), request_id=request_id)


def redriven_id(old_id: str, stored: Stored) -> str:
    """Return the id under which a letter's request is sent in: always the same, and an id by the rules.

    A letter of a request that was redriven already begins anew at the first id, so that ids do not grow.
    """
    base = old_id.partition(ID_SUFFIX)[0]
    suffix = f"{ID_SUFFIX}{stored.partition}-{stored.offset}"
    room = MAX_ID_CHARS - len(suffix)
    if not ID_PATTERN.fullmatch(base):
        base = "unnamed"
    if len(base) > room:
        base = f"{base[: room - 9]}-{hashlib.sha256(base.encode()).hexdigest()[:8]}"
    return base + suffix


async def send_redrive(producer: Producer, redrive: Redrive) -> None:
    """Send a letter in again, and note it beside the letter. Raises InvalidRequestError if it is too large."""
    await producer.send(redrive.topic, redrive.value, key=redrive.key, headers=redrive.headers)
    note = Redriven(
        offset=redrive.stored.offset,
        topic=redrive.topic,
        redriven_ms=now_ms(),
        request_id=redrive.request_id or "",
    )
    headers: Headers = ((CE_TYPE, REDRIVEN_TYPE.encode()), (CONTENT_TYPE, MSGPACK.encode()))
    place = redrive.stored
    await producer.send(DEAD_LETTER, pack(note), key=b"redriven", headers=headers, partition=place.partition)
