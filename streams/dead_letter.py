"""Puts a record that cannot succeed where operators find it: raw, with its place and the reason."""

from __future__ import annotations

import structlog

from schemas.codec import pack
from schemas.envelope import CE_TYPE, CONTENT_TYPE, DEAD_LETTER_TYPE, MSGPACK, REQUEST_ID, Headers
from schemas.errors import BrokerUnavailableError, GeaError, InvalidRequestError
from schemas.failure import DeadLetter
from streams.broker import Producer, Record
from streams.clock import now_ms
from streams.topics import DEAD_LETTER

log = structlog.get_logger(__name__)

HEADERS: Headers = ((CE_TYPE, DEAD_LETTER_TYPE.encode()), (CONTENT_TYPE, MSGPACK.encode()))


async def dead_letter(producer: Producer, record: Record, error: GeaError, worker_id: str) -> None:
    """Write `record` to the dead-letter topic, under its own key; returns when it is acknowledged.

    Acknowledge the record only afterwards. A record so large that it does not fit with its reason is written without
    its value: topic, partition and offset still say where it stands.
    """
    letter = DeadLetter(
        code=error.code,
        message=error.message,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        value=record.value,
        key=record.key,
        headers=record.headers,
        request_id=_request_id(record),
        worker_id=worker_id,
        failed_ms=now_ms(),
    )
    try:
        await producer.send(DEAD_LETTER, pack(letter), key=record.key, headers=HEADERS)
    except InvalidRequestError as refusal:
        if refusal.field == "topic":  # no record is to blame for that, and none may be lost by it
            raise BrokerUnavailableError(f"{refusal.message}: `gea topics apply` makes it") from refusal
        await producer.send(DEAD_LETTER, pack(_without_value(letter)), headers=HEADERS)
    log.warning(
        "dead_letter",
        code=error.code,
        reason=error.message,
        topic=record.topic,
        partition=record.partition,
        offset=record.offset,
        request_id=letter.request_id,
    )


def _request_id(record: Record) -> str:
    values = [value for name, value in record.headers if name == REQUEST_ID]
    return values[-1].decode("utf-8", "replace")[:128] if values else ""


def _without_value(letter: DeadLetter) -> DeadLetter:
    size = len(letter.value or b"")
    return DeadLetter(
        code=letter.code,
        message=f"{letter.message} (value of {size} bytes, key and headers left out)",
        topic=letter.topic,
        partition=letter.partition,
        offset=letter.offset,
        request_id=letter.request_id,
        worker_id=letter.worker_id,
        failed_ms=letter.failed_ms,
        is_left_out=True,
    )
