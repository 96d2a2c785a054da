"""What is said about requests: written, read, refused."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import pack
from schemas.control import MAX_REASON_CHARS, Control, ControlKind
from schemas.envelope import CONTENT_TYPE, JSON, Headers
from schemas.errors import BrokerUnavailableError, DecodeError, InvalidRequestError, UnsupportedVersionError
from streams.broker import Record
from streams.control import keep_saying, read_control, send_control
from streams.topics import CONTROL
from tests.streams.token_fakes import broker_with_topics

CANCEL = Control(kind=ControlKind.CANCEL, request_id="r-1", tenant="a", sent_ms=7, reason="enough")


def record(value: bytes | None, headers: Headers = ()) -> Record:
    return Record(topic=CONTROL, partition=0, offset=0, timestamp_ms=0, key=b"r-1", value=value, headers=headers)


async def test_what_is_sent_can_be_read_and_stands_under_the_requests_key() -> None:
    broker = await broker_with_topics()
    written = await send_control(await broker.producer(), CANCEL)
    assert (written.topic, written.key) == (CONTROL, b"r-1")
    assert read_control(written) == CANCEL


def test_any_kafka_client_can_cancel_in_json() -> None:
    body = b'{"kind": "cancel", "request_id": "r-1", "unknown": 1}'
    read = read_control(record(body, ((CONTENT_TYPE, JSON.encode()),)))
    assert read == Control(kind=ControlKind.CANCEL, request_id="r-1", tenant="default")


@pytest.mark.parametrize(
    ("control", "field"),
    [
        (Control(kind=ControlKind.CANCEL, request_id="no good"), "request_id"),
        (Control(kind=ControlKind.CANCEL, request_id=""), "request_id"),
        (Control(kind=ControlKind.CANCEL, request_id="r-1", tenant="a/b"), "tenant"),
        (Control(kind=ControlKind.CANCEL, request_id="r-1", reason="x" * (MAX_REASON_CHARS + 1)), "reason"),
    ],
)
async def test_a_field_out_of_range_is_refused_on_both_sides(control: Control, field: str) -> None:
    broker = await broker_with_topics()
    with pytest.raises(InvalidRequestError) as caught:
        await send_control(await broker.producer(), control)
    assert caught.value.field == field
    assert broker.records(CONTROL) == []
    with pytest.raises(InvalidRequestError):
        read_control(record(pack(control)))


@pytest.mark.parametrize(
    ("value", "headers", "error"),
    [
        (None, (), DecodeError),
        (b"\xc1", (), DecodeError),
        (b"\x80" + b"\x00" * 5_000, (), DecodeError),
        (b"{}", (), DecodeError),
        (b"[]", ((CONTENT_TYPE, b"application/json"),), DecodeError),
        (b"{", ((CONTENT_TYPE, b"application/json"),), DecodeError),
        (b"\xff", ((CONTENT_TYPE, b"application/json"),), DecodeError),
        (b'{"kind": "burn", "request_id": "r-1"}', ((CONTENT_TYPE, b"application/json"),), InvalidRequestError),
        (b'{"kind": "cancel"}', ((CONTENT_TYPE, b"application/json"),), InvalidRequestError),
        (pack(CANCEL), (("ce_type", b"gea.control.v2"),), UnsupportedVersionError),
    ],
)
def test_what_is_no_saying_is_refused(value: bytes | None, headers: Headers, error: type[Exception]) -> None:
    with pytest.raises(error):
        read_control(record(value, headers))


@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_are_read_or_refused(value: bytes, is_json: bool) -> None:
    headers = ((CONTENT_TYPE, JSON.encode()),) if is_json else ()
    with contextlib.suppress(DecodeError, InvalidRequestError):
        read_control(record(value, headers))


async def test_saying_goes_on_when_the_broker_is_away_and_stops_after_its_time() -> None:
    said: list[int] = []

    async def say() -> None:
        said.append(len(said))
        if len(said) == 1:
            raise BrokerUnavailableError("away")

    async with asyncio.timeout(5):
        await keep_saying(say, 0.003, seconds=0.05, at_once=True)
    assert len(said) > 2


async def test_nothing_is_said_at_once_where_the_request_itself_was_a_sign_of_life() -> None:
    said: list[int] = []

    async def say() -> None:
        said.append(1)

    await keep_saying(say, 30.0, seconds=0.01, at_once=False)
    assert said == []
