"""The writer where a send fails, hangs or is refused: it ends in bounded time, and says nothing that is not written."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schemas.errors import BrokerUnavailableError, InternalError, InvalidRequestError
from schemas.tokens import End, EndStatus, FinishReason
from streams.broker import Record
from streams.token_writer import TokenWriter, WriterLimits
from tests.streams.token_fakes import COMPLETED, REPLY, GatedProducer, broker_with_topics, tokens_of, until
from tests.streams.token_writing import EPOCH, PATIENT, view_of, writer_on


async def test_a_failed_send_stops_the_stream_for_good() -> None:
    broker = await broker_with_topics()
    producer = GatedProducer(await broker.producer())
    async with TokenWriter(producer, REPLY, "r1", epoch=EPOCH, limits=PATIENT) as writer:
        producer.is_broken = True
        await writer.append(0, "a", (0,))
        await until(lambda: writer._failure is not None)
        producer.is_broken = False
        with pytest.raises(BrokerUnavailableError):
            await writer.append(0, "b", (1,))
        with pytest.raises(BrokerUnavailableError):
            await writer.end(COMPLETED)
    assert tokens_of(broker, "r1") == []


async def test_a_send_that_hangs_fails_in_bounded_time() -> None:
    broker = await broker_with_topics()
    producer = GatedProducer(await broker.producer())
    producer.gate.clear()
    limits = WriterLimits(max_tokens=1, max_delay_ms=0, max_pending_tokens=1, send_ms=10)
    async with TokenWriter(producer, REPLY, "r1", epoch=EPOCH, limits=limits) as writer:
        await writer.append(0, "a", (0,))
        with pytest.raises(BrokerUnavailableError):
            async with asyncio.timeout(5):
                while True:
                    await writer.append(0, "b", (1,))


async def test_lone_surrogates_are_refused_and_the_stream_goes_on() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        with pytest.raises(InternalError):
            await writer.append(0, "a\ud83d", (1,))
        await writer.append(0, "ok", (1,))
        await writer.end(COMPLETED)
    assert (await view_of(broker)).text() == "ok"


async def test_nothing_can_follow_the_end() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        await writer.end(COMPLETED)
        with pytest.raises(InternalError):
            await writer.append(0, "a", (1,))
        with pytest.raises(InternalError):
            await writer.end(COMPLETED)


class PickyProducer(GatedProducer):
    """Refuses records above a size, as Kafka does."""

    async def send(self, topic: str, value: bytes | None, **place: Any) -> Record:
        if len(value or b"") > 2_000:
            raise InvalidRequestError("the record is too large")
        return await super().send(topic, value, **place)


async def test_after_a_record_that_the_broker_refuses_a_failed_end_speaks_of_what_is_written() -> None:
    broker = await broker_with_topics()
    producer = PickyProducer(await broker.producer())
    async with TokenWriter(producer, REPLY, "r1", epoch=EPOCH, limits=PATIENT) as writer:
        await writer.append(0, "small", (1,))
        await broker.until(lambda: len(tokens_of(broker, "r1")) == 1)
        await writer.append(0, "x" * 3_000, (2,))
        with pytest.raises(InvalidRequestError):
            await writer.end(COMPLETED)
        with pytest.raises(InvalidRequestError):
            await writer.end(COMPLETED)
        await writer.end(End(status=EndStatus.FAILED, finish_reason=FinishReason.ERROR))
    view = await view_of(broker)
    assert view.end is not None
    assert (view.end.status, view.text(), view.end.usage.completion_tokens) == (EndStatus.FAILED, "small", 1)


async def test_a_fault_in_the_background_does_not_leave_the_writer_waiting_for_room() -> None:
    broker = await broker_with_topics()
    producer = GatedProducer(await broker.producer())
    producer.gate.clear()
    limits = WriterLimits(max_tokens=1, max_delay_ms=0, max_pending_tokens=1)
    async with TokenWriter(producer, REPLY, "r1", epoch=EPOCH, limits=limits) as writer, asyncio.timeout(5):
        await writer.append(0, "a", (1,))
        await until(lambda: producer.num_waiting == 1)
        await writer.append(0, "b", (2,))
        waiting = asyncio.create_task(writer.append(0, "c", (3,)))
        await asyncio.sleep(0)
        assert writer._flusher is not None
        writer._flusher.cancel()
        with pytest.raises(BrokerUnavailableError):
            await waiting
