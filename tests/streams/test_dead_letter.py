"""Dead letters."""

from __future__ import annotations

import pytest

from schemas.codec import unpack
from schemas.errors import BrokerUnavailableError, DecodeError
from schemas.failure import DeadLetter
from streams.broker import TopicSpec
from streams.dead_letter import dead_letter
from streams.memory import MemoryBroker
from streams.topics import DEAD_LETTER


async def letter_of(value: bytes) -> tuple[DeadLetter, bytes | None]:
    broker = MemoryBroker()
    await broker.create_topics([TopicSpec(name=name, num_partitions=1) for name in ("t", DEAD_LETTER)])
    producer = await broker.producer()
    record = await producer.send("t", value, key=b"k", headers=(("request_id", b"r\xff"), ("other", b"\xff")))
    await dead_letter(producer, record, DecodeError("not MessagePack"), "worker-1")
    (written,) = broker.records(DEAD_LETTER)
    return unpack(written.value, DeadLetter), written.key


async def test_the_raw_record_its_place_and_the_reason_are_kept() -> None:
    letter, key = await letter_of(b"\xc1\x00")
    assert (letter.code, letter.message) == ("undecodable", "not MessagePack")
    assert (letter.topic, letter.partition, letter.offset) == ("t", 0, 0)
    assert (letter.value, letter.key, key) == (b"\xc1\x00", b"k", b"k")
    assert letter.headers == (("request_id", b"r\xff"), ("other", b"\xff"))
    assert (letter.request_id, letter.worker_id) == ("r\N{REPLACEMENT CHARACTER}", "worker-1")


async def test_a_record_too_large_for_its_envelope_is_written_without_its_value() -> None:
    letter, _ = await letter_of(bytes(1_048_500))
    assert letter.value is None
    assert "1048500 bytes" in letter.message


async def test_without_the_topic_of_dead_letters_no_record_counts_as_put_aside() -> None:
    broker = MemoryBroker()
    await broker.create_topics([TopicSpec(name="t", num_partitions=1)])
    producer = await broker.producer()
    record = await producer.send("t", b"x")
    with pytest.raises(BrokerUnavailableError, match="gea topics apply"):
        await dead_letter(producer, record, DecodeError("x"), "worker-1")
