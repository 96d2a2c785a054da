"""Dead letters on real Kafka: found, sent in again, noted; a value left out is fetched from where it came from."""

from __future__ import annotations

import pytest

from ops.dlq import DeadLetterLog, LetterFilter
from ops.redrive import Outcome, Step, redrive_letters
from schemas.errors import DecodeError, InternalError
from streams.broker import Record, TopicPartition
from streams.dead_letter import dead_letter
from streams.kafka import KafkaBroker
from streams.reading import read_until
from streams.topics import REQUESTS, topic_specs
from tests.ops.letters import BODY, PUBLIC

pytestmark = pytest.mark.kafka


async def steps(broker: KafkaBroker, wanted: LetterFilter, **options: bool) -> list[Step]:
    log = await DeadLetterLog.open(broker)
    return [step async for step in redrive_letters(broker, log, wanted, **options)]


async def test_letters_are_listed_redriven_once_and_skipped_afterwards(broker: KafkaBroker) -> None:
    await broker.create_topics(topic_specs(2))
    producer = await broker.producer()
    for value, error in (
        (BODY, InternalError("boom")),
        (b"\xc1", DecodeError("x")),
        (b"x" * 1_048_300, DecodeError("x")),
    ):
        record = await producer.send(REQUESTS, value, key=b"r-1", headers=PUBLIC)
        await dead_letter(producer, record, error, "worker-1")
    log = await DeadLetterLog.open(broker)
    letters = [stored.letter async for stored in log.letters(LetterFilter(request_id="r-1"))]
    assert sorted(letter.is_left_out for letter in letters) == [False, False, True]

    done = await steps(broker, LetterFilter(request_id="r-1"))
    assert sorted(step.outcome for step in done) == [Outcome.REFUSED, Outcome.REFUSED, Outcome.SENT]
    sent = next(step for step in done if step.outcome is Outcome.SENT)
    reader = await broker.reader({TopicPartition(REQUESTS, number): 0 for number in range(2)})
    seen: list[Record] = []
    async for records in read_until(reader, await reader.end_offsets(), timeout_ms=500):
        seen += records
    await reader.close()
    assert [record.value for record in seen if record.key == sent.request_id.encode()] == [BODY]

    again = await steps(broker, LetterFilter(code="internal"))
    assert [(step.outcome, step.request_id) for step in again] == [(Outcome.SKIPPED, sent.request_id)]
    forced = await steps(broker, LetterFilter(code="undecodable"), is_forced=True)
    assert [step.outcome for step in forced] == [Outcome.SENT, Outcome.SENT]
    await producer.close()
