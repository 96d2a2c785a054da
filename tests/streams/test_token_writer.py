"""The writer: the first token at once, then gathered; order, claims, hashes; bounded when the broker is slow."""

from __future__ import annotations

import asyncio
import hashlib

import msgspec
import pytest

from schemas.errors import InternalError
from schemas.tokens import Choice, Claim, EndStatus, Epoch, Failure, FinishReason, Kind, See, TokenLogprob, Usage
from streams.token_reader import read_view
from streams.token_record import TOKEN_HEADERS, end_request, point_to
from streams.token_writer import TokenWriter, WriterLimits
from streams.topics import TOKENS
from tests.streams.token_fakes import COMPLETED, REPLY, GatedProducer, broker_with_topics, tokens_of, until
from tests.streams.token_writing import EPOCH, view_of, writer_on


async def test_the_first_text_goes_out_at_once_with_the_claim_on_it() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        await writer.append(0, "Hel", (1,))
        await broker.until(lambda: len(tokens_of(broker, "r1")) == 1)
        record = tokens_of(broker, "r1")[0]
        assert (record.kind, record.text, record.claim, record.epoch) == (Kind.DELTA, "Hel", Claim(model="m"), EPOCH)
        raw = broker.records(TOKENS)[0]
        assert (raw.key, raw.partition, raw.headers) == (b"r1", REPLY.partition, TOKEN_HEADERS)


async def test_later_tokens_are_gathered_until_the_number_is_reached() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        for number, text in enumerate("abcdef"):
            await writer.append(0, text, (number,))
            if number == 0:
                await broker.until(lambda: len(tokens_of(broker, "r1")) == 1)
            if number == 4:
                await broker.until(lambda: len(tokens_of(broker, "r1")) == 2)
        second = tokens_of(broker, "r1")[1]
        assert (second.seq, second.text, second.claim) == (1, "bcde", None)
        await writer.end(COMPLETED)
    assert [record.text for record in tokens_of(broker, "r1")] == ["a", "bcde", "f", ""]


async def test_waiting_tokens_go_out_after_the_delay() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker, WriterLimits(max_tokens=100, max_delay_ms=1)) as writer:
        await writer.append(0, "a", (1,))
        await broker.until(lambda: len(tokens_of(broker, "r1")) == 1)
        await writer.append(0, "b", (2,))
        await broker.until(lambda: len(tokens_of(broker, "r1")) == 2)


async def test_the_end_has_counts_and_hashes_filled_in() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        await writer.append(0, "你好", (1, 2), (TokenLogprob(token_id=1, logprob=-0.5),) * 2)
        await writer.append(0, "👨‍👩‍👧")
        await writer.end(COMPLETED)
    *deltas, last = tokens_of(broker, "r1")
    text = "你好👨‍👩‍👧"
    assert "".join(record.text for record in deltas) == text
    assert last.end is not None
    assert last.end.sha256 == hashlib.sha256(text.encode()).hexdigest()
    assert (last.seq, last.end.num_records, last.end.usage) == (2, len(deltas) + 1, Usage(completion_tokens=2))
    assert (await view_of(broker)).is_ended


async def test_an_end_without_text_carries_the_claim() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        await writer.end(COMPLETED)
    (only,) = tokens_of(broker, "r1")
    assert (only.kind, only.claim is not None) == (Kind.END, True)
    assert (await view_of(broker)).is_ended


async def test_text_without_tokens_waits_for_the_next_token_or_the_end() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        await writer.append(0, "a prepared ")
        await writer.append(0, "text")
        await writer.end(COMPLETED)
    assert [(record.kind, record.text) for record in tokens_of(broker, "r1")] == [
        (Kind.DELTA, "a prepared text"),
        (Kind.END, ""),
    ]
    assert (await view_of(broker)).text() == "a prepared text"


async def test_several_choices_keep_their_own_count() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        for text in "abcdefgh":
            await writer.append(0, text, (1,))
            await writer.append(1, text.upper(), (2,))
        length = Choice(index=1, finish_reason=FinishReason.LENGTH, num_tokens=0, sha256="")
        await writer.end(msgspec.structs.replace(COMPLETED, choices=(length,)))
    view = await view_of(broker)
    assert (view.text(0), view.text(1), view.usage.completion_tokens) == ("abcdefgh", "ABCDEFGH", 16)
    assert view.end is not None
    assert [choice.num_tokens for choice in view.end.choices] == [8, 8]
    assert [choice.finish_reason for choice in view.end.choices] == [FinishReason.STOP, FinishReason.LENGTH]


async def test_a_take_over_continues_text_count_and_hash() -> None:
    broker = await broker_with_topics()
    first = await writer_on(broker)
    await first.append(0, "Hello", (1, 2))
    await broker.until(lambda: len(tokens_of(broker, "r1")) == 1)
    await first.close()  # dies
    async with await writer_on(broker, epoch=Epoch(0, 4)) as second:
        offset = await second.claim()
        view = await read_view(broker, REPLY, "r1", until=offset + 1, timeout_s=1)
        assert view.is_owned_by(second.epoch, second.owner)
        assert (view.text(), view.next_seq()) == ("Hello", 2)
        second.resume(view)
        await second.append(0, " world", (3,))
        await second.end(COMPLETED)
    whole = await view_of(broker)
    assert (whole.text(), whole.is_ended, whole.usage.completion_tokens) == ("Hello world", True, 3)


async def test_a_reset_voids_pending_text_and_starts_the_count_again() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        await writer.append(0, "wrong", (1, 2))
        await broker.until(lambda: len(tokens_of(broker, "r1")) == 1)
        await writer.append(0, "pending", (3,))
        await writer.reset()
        await writer.append(0, "right", (4,))
        await writer.end(COMPLETED)
    view = await view_of(broker)
    assert (view.text(), view.usage.completion_tokens) == ("right", 1)


async def test_what_a_text_is_made_from_rides_on_its_first_record_and_on_the_first_after_a_reset() -> None:
    broker = await broker_with_topics()
    made_from = Claim(model="m", plan="p", memory=(("q", "a"),))
    async with await writer_on(broker) as writer:
        await writer.claim()
        with pytest.raises(InternalError):
            await writer.claim()
        writer.describe(made_from)
        await writer.append(0, "a", (1,))
        await broker.until(lambda: len(tokens_of(broker, "r1")) == 2)
        await writer.reset()
        again = msgspec.structs.replace(made_from, plan="other")
        writer.describe(again)
        await writer.append(0, "b", (2,))
        await broker.until(lambda: len(tokens_of(broker, "r1")) == 4)
        assert (await view_of(broker)).origin == again
        await writer.end(COMPLETED)
    claims = [record.claim for record in tokens_of(broker, "r1")]
    assert claims == [Claim(model="m"), made_from, None, again, None]


async def test_an_end_tells_nobody_how_to_continue() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        writer.describe(Claim(model="m", plan="p", memory=(("q", "a"),)))
        await writer.end(COMPLETED)
    assert [record.claim for record in tokens_of(broker, "r1")] == [Claim(model="m")]


async def test_tokens_gather_while_a_send_is_on_its_way_and_append_waits_when_too_many_do() -> None:
    broker = await broker_with_topics()
    producer = GatedProducer(await broker.producer())
    limits = WriterLimits(max_tokens=2, max_delay_ms=0, max_pending_tokens=4)
    async with TokenWriter(producer, REPLY, "r1", epoch=EPOCH, limits=limits) as writer:
        producer.gate.clear()
        await writer.append(0, "a", (0,))
        await until(lambda: producer.num_waiting == 1)
        for text in "bcde":
            await writer.append(0, text, (1,))
        blocked = asyncio.create_task(writer.append(0, "f", (2,)))
        await until(lambda: producer.num_waiting == 1)
        assert not blocked.done()
        producer.gate.set()
        await blocked
        await writer.end(COMPLETED)
    assert "".join(record.text for record in tokens_of(broker, "r1")) == "abcdef"
    assert [record.text for record in tokens_of(broker, "r1")][:2] == ["a", "bcde"]


async def test_a_writer_that_is_closed_without_an_end_leaves_no_task() -> None:
    broker = await broker_with_topics()
    async with await writer_on(broker) as writer:
        await writer.append(0, "a", (1,))
    assert len(asyncio.all_tasks()) == 1


async def test_a_request_is_ended_early_in_one_record() -> None:
    broker = await broker_with_topics()
    producer = await broker.producer()
    failure = Failure(code="overloaded", message="later", retry_after_s=1.5)
    await end_request(producer, REPLY, "r1", epoch=Epoch(0, 1), failure=failure)
    await end_request(producer, REPLY, "r1", epoch=Epoch(1, 1), failure=Failure(code="internal", message="late"))
    end = (await view_of(broker)).end
    assert end is not None
    assert (end.status, end.finish_reason, end.failure) == (EndStatus.FAILED, FinishReason.ERROR, failure)


async def test_a_repeat_is_pointed_to_its_stream() -> None:
    broker = await broker_with_topics()
    see = See(topic=TOKENS, partition=2, offset=5)
    await point_to(await broker.producer(), REPLY, "r1", epoch=Epoch(0, 0), see=see)
    (record,) = tokens_of(broker, "r1")
    assert (record.kind, record.see, record.claim) == (Kind.SEE, see, None)
