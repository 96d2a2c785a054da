"""Readers: over gaps, repeats, lost brokers and references."""

from __future__ import annotations

import pytest

from schemas.codec import pack
from schemas.errors import (
    BrokerUnavailableError,
    DecodeError,
    InvalidRequestError,
    ResponseTimeoutError,
    StreamError,
    StreamExpiredError,
    StreamGapError,
    UnsupportedVersionError,
)
from schemas.tokens import Kind, See, TokenRecord
from streams.broker import Record
from streams.memory import MemoryBroker
from streams.stream_events import Event, StreamEnded, TextAppended
from streams.token_reader import StreamReader, decode_token, read_stream, read_view
from streams.token_record import point_to, send_token
from streams.topics import TOKENS
from tests.streams.token_fakes import COMPLETED, REPLY, broker_with_topics
from tests.streams.token_streams import EPOCH, PLACE, write


async def text_of(broker: MemoryBroker, request_id: str, start: int = 0, partition: int = 1) -> str:
    events = read_stream(broker, TOKENS, partition, start, request_id, timeout_s=1)
    return "".join([event.text async for event in events if isinstance(event, TextAppended)])


def record_of(value: bytes | None, headers: tuple[tuple[str, bytes], ...] = ()) -> Record:
    return Record(topic=TOKENS, partition=1, offset=0, timestamp_ms=0, key=b"r1", value=value, headers=headers)


async def test_a_stream_is_read_among_others_until_its_end() -> None:
    broker = await broker_with_topics()
    await write(broker, "other", "xx", is_ended=False)
    await write(broker, "r1", "He", "llo")
    assert await text_of(broker, "r1") == "Hello"


async def test_undecodable_records_are_skipped_and_counted() -> None:
    broker = await broker_with_topics()
    producer = await broker.producer()
    await producer.send(TOKENS, b"\xc1garbage", key=b"r1", partition=1)
    await producer.send(TOKENS, None, key=b"r1", partition=1)
    await write(broker, "r1", "ok")
    reader = StreamReader(broker, "r1", PLACE, 0)
    while not reader.view.is_ended:
        await reader.next_events(1)
    assert (reader.view.text(), reader.num_undecodable) == ("ok", 2)


@pytest.mark.parametrize(
    "change",
    [{"index": 8}, {"index": -1}, {"seq": -1}, {"kind": "claim"}, {"kind": "see"}, {"kind": "end"}, {"kind": "what"}],
)
def test_a_record_that_makes_no_sense_is_refused(change: dict[str, object]) -> None:
    import msgpack

    body = {"kind": "delta", "epoch": [0, 1], "owner": "a", **change}
    with pytest.raises((DecodeError, InvalidRequestError)):
        decode_token(record_of(msgpack.packb(body)))


def test_another_version_is_refused() -> None:
    record = TokenRecord(kind=Kind.DELTA, epoch=EPOCH, owner="a", v=2)
    with pytest.raises(UnsupportedVersionError):
        decode_token(record_of(pack(record)))
    with pytest.raises(UnsupportedVersionError):
        decode_token(record_of(pack(record), (("ce_type", b"gea.token.v2"),)))


async def test_a_gap_is_raised_after_what_came_before_it() -> None:
    broker = await broker_with_topics()
    await write(broker, "r1", "ab", is_ended=False)
    late = TokenRecord(kind=Kind.DELTA, epoch=EPOCH, owner="a", seq=5, text="x", token_ids=(1,))
    await send_token(await broker.producer(), REPLY, "r1", late)
    seen: list[Event] = []
    with pytest.raises(StreamGapError):
        async for event in read_stream(broker, TOKENS, 1, 0, "r1", timeout_s=1):
            seen.append(event)
    assert [event.text for event in seen if isinstance(event, TextAppended)] == ["ab"]


async def test_a_stream_that_does_not_end_times_out_with_its_request_id() -> None:
    broker = await broker_with_topics()
    await write(broker, "r1", "ab", is_ended=False)
    with pytest.raises(ResponseTimeoutError) as caught:
        async for _ in read_stream(broker, TOKENS, 1, 0, "r1", timeout_s=0.02):
            pass
    assert caught.value.request_id == "r1"


async def test_an_expired_start_is_named() -> None:
    broker = await broker_with_topics()
    await write(broker, "r1", "ab")
    broker.expire(TOKENS, 1, 1)
    with pytest.raises(StreamExpiredError):
        await text_of(broker, "r1")


async def test_a_reference_is_followed_and_loops_are_not() -> None:
    broker = await broker_with_topics()
    producer = await broker.producer()
    await write(broker, "r1", "Hello")  # partition 1, offset 0
    elsewhere = REPLY.__class__(topic=TOKENS, partition=2)
    await point_to(producer, elsewhere, "r1", epoch=EPOCH, see=See(topic=TOKENS, partition=2, offset=0))
    await point_to(producer, elsewhere, "r1", epoch=EPOCH, see=See(topic=TOKENS, partition=1, offset=0))
    assert await text_of(broker, "r1", partition=2) == "Hello"


async def test_a_reference_back_into_the_same_partition_is_followed_once() -> None:
    broker = await broker_with_topics()
    await write(broker, "r1", "He", "llo", is_ended=False)
    start = len(broker.records(TOKENS))
    see = See(topic=TOKENS, partition=1, offset=0)
    await point_to(await broker.producer(), REPLY, "r1", epoch=EPOCH, see=see)
    end = TokenRecord(kind=Kind.END, epoch=EPOCH, owner="a", seq=5, end=COMPLETED)
    await send_token(await broker.producer(), REPLY, "r1", end)
    assert await text_of(broker, "r1", start=start) == "Hello"


async def test_an_endless_chain_of_references_is_given_up() -> None:
    broker = await broker_with_topics()
    for offset in range(20):
        see = See(topic=TOKENS, partition=1, offset=offset + 1)
        await point_to(await broker.producer(), REPLY, "r1", epoch=EPOCH, see=see)
    with pytest.raises(StreamError):
        await text_of(broker, "r1")


async def test_reading_goes_on_after_the_broker_was_away() -> None:
    broker = await broker_with_topics()
    await write(broker, "r1", "He", is_ended=False)
    reader = StreamReader(broker, "r1", PLACE, 0)
    assert len(await reader.next_events(1)) == 1
    broker.down = True
    assert await reader.next_events(0.01) == ()
    assert reader.last_failure is not None
    broker.down = False
    end = TokenRecord(kind=Kind.END, epoch=EPOCH, owner="a", seq=2, end=COMPLETED)
    await send_token(await broker.producer(), REPLY, "r1", end)
    assert [type(event) for event in await reader.next_events(5)] == [StreamEnded]
    await reader.close()


async def test_a_view_ends_where_it_was_asked_to() -> None:
    broker = await broker_with_topics()
    await write(broker, "r1", "ab", "cd", "ef")
    view = await read_view(broker, REPLY, "r1", until=2, timeout_s=1)
    assert (view.text(), view.is_ended) == ("abcd", False)


async def test_a_view_that_cannot_be_read_is_given_up_in_bounded_time() -> None:
    broker = await broker_with_topics()
    await write(broker, "r1", "ab", is_ended=False)
    broker.down = True
    with pytest.raises(BrokerUnavailableError):
        await read_view(broker, REPLY, "r1", until=1, timeout_s=0.02)
