"""What a caller sees of an answer: its text after withdrawals, its numbers, and why it failed."""

from __future__ import annotations

import io

import msgspec
import pytest

from ops.answering import Answered, follow
from ops.commands.ask import TextPrinter, show_footer
from ops.commands.tail import line_of
from ops.errors import CommandError
from schemas.envelope import Reply
from schemas.errors import RequestFailedError
from schemas.tokens import (
    Citation,
    End,
    EndStatus,
    Epoch,
    Failure,
    FinishReason,
    Kind,
    Usage,
)
from streams.answer import Chunk
from streams.client import GeaClient
from streams.memory import MemoryBroker
from streams.routing import murmur2_partition
from streams.token_reader import decode_token
from streams.token_writer import TokenWriter
from streams.topics import TOKENS, topic_specs

REQUEST_ID = "r-1"
COMPLETED = End(
    status=EndStatus.COMPLETED,
    finish_reason=FinishReason.STOP,
    usage=Usage(prompt_tokens=9),
    citations=(Citation(passage_id="returns-shoes", title="Returns"),),
    strategy="knowledge",
    passage_ids=("returns-shoes",),
)


async def written(*texts: str | None, end: End) -> MemoryBroker:
    """Return a broker that holds one whole stream; None resets it."""
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(2))
    reply = Reply(topic=TOKENS, partition=murmur2_partition(REQUEST_ID.encode(), 2))
    async with TokenWriter(await broker.producer(), reply, REQUEST_ID, epoch=Epoch(0, 1)) as writer:
        for number, text in enumerate(texts):
            if text is None:
                await broker.until(lambda: bool(broker.records(TOKENS)))
                await writer.reset()
            else:
                await writer.append(0, text, (number,))
        await writer.end(end)
    return broker


async def followed(broker: MemoryBroker, printer: TextPrinter) -> Answered:
    async with GeaClient(broker) as client:
        return await follow(client.replay(REQUEST_ID), on_chunk=printer)


async def test_answer_is_printed_and_returned_with_its_numbers() -> None:
    out = io.StringIO()
    broker = await written("You have ", "30 ", "days.", end=COMPLETED)
    answered = await followed(broker, TextPrinter(out))
    assert out.getvalue() == answered.text == "You have 30 days."
    told = answered.to_json()
    assert told["tokens"] == 3
    assert told["citations"][0]["passage_id"] == "returns-shoes"
    assert told["passages"] == ["returns-shoes"]
    assert told["status"] == "completed"
    assert 0 <= told["ttft_ms"] <= told["total_ms"]
    assert {"answer", "strategy", "tokens_per_s", "request_id", "usage"} <= set(told)


async def test_text_before_a_reset_does_not_count() -> None:
    out = io.StringIO()
    answered = await followed(await written("wrong", None, "right", end=COMPLETED), TextPrinter(out))
    assert answered.text == "right"
    assert "withdrawn" in out.getvalue()


async def test_failed_request_is_one_line_with_its_code() -> None:
    why = Failure(code="prompt_too_long", message="too long", field="prompt")
    end = End(status=EndStatus.FAILED, finish_reason=FinishReason.ERROR, failure=why)
    with pytest.raises(CommandError, match=r"r-1 failed: prompt_too_long: too long") as caught:
        await followed(await written(end=end), TextPrinter(io.StringIO()))
    assert caught.value.code == "prompt_too_long"
    assert caught.value.report == {"request_id": REQUEST_ID}


async def test_who_is_turned_away_for_the_load_is_told_when_to_come_back() -> None:
    why = Failure(code="overloaded", message="5 requests wait, at most 5 may", retry_after_s=3.4)
    broker = await written(end=End(status=EndStatus.FAILED, finish_reason=FinishReason.ERROR, failure=why))
    with pytest.raises(CommandError, match=r"at most 5 may; come back in 3 s") as told:
        await followed(broker, TextPrinter(io.StringIO()))
    assert told.value.report["retry_after_s"] == 3.4
    async with GeaClient(broker) as client:
        with pytest.raises(RequestFailedError) as caught:
            await client.replay(REQUEST_ID).answer()
    assert caught.value.retry_after_s == 3.4


@pytest.mark.parametrize(
    ("ttft_ms", "total_ms", "expected"),
    [(100, 1100, 2.0), (100, 100, 30.0), (95, 100, 30.0), (0, 0, 3000.0)],
)
def test_rate_counts_the_tokens_after_the_first(ttft_ms: float, total_ms: float, expected: float) -> None:
    end = msgspec.structs.replace(COMPLETED, usage=Usage(completion_tokens=3))
    answered = Answered(request_id=REQUEST_ID, text="", texts=(), end=end, ttft_ms=ttft_ms, total_ms=total_ms)
    assert answered.tokens_per_s == pytest.approx(expected)


@pytest.mark.parametrize("reason", list(FinishReason))
def test_an_answer_that_is_cut_is_told_so_in_one_line(reason: FinishReason, capsys: pytest.CaptureFixture[str]) -> None:
    end = msgspec.structs.replace(COMPLETED, finish_reason=reason)
    show_footer(Answered(request_id=REQUEST_ID, text="", texts=(), end=end, ttft_ms=1, total_ms=2))
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("is cut") == (reason is FinishReason.LENGTH)


def test_printer_shows_only_the_first_choice_and_ends_its_line() -> None:
    out = io.StringIO()
    printer = TextPrinter(out)
    for chunk in (Chunk(text="a"), Chunk(text="z", index=1), Chunk(text="b", retracted="a")):
        printer(chunk)
    printer.finish()
    printer.finish()
    assert out.getvalue() == "a\n[withdrawn: a]\nb\n"


async def test_records_are_shown_one_a_line_and_markup_in_them_is_not_obeyed() -> None:
    broker = await written("[bold]x\ny", end=COMPLETED)
    lines = [line_of(record, REQUEST_ID, decode_token(record)) for record in broker.records(TOKENS)]
    assert len(lines) == 2
    assert "\n" not in lines[0]
    assert r"\[bold]x\ny" in lines[0]
    assert f"[green]{Kind.END}[/]" in lines[1]
    assert "completed stop knowledge 1 tokens" in lines[1]
    assert "\x1b" not in line_of(broker.records(TOKENS)[0], "\x1b[2J", decode_token(broker.records(TOKENS)[0]))
