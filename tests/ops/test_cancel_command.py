"""`gea cancel`, and what Ctrl-C does to `gea ask`."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from typer.testing import CliRunner

from ops import cli
from ops.commands import ask, cancel
from ops.commands.ask import TextPrinter
from ops.errors import CommandError
from schemas.control import ControlKind
from schemas.envelope import Reply
from schemas.request import GenerationRequest
from schemas.tokens import End, EndStatus, Epoch, FinishReason
from streams import ClientSettings, GeaClient
from streams.broker import Producer
from streams.control import read_control
from streams.memory import MemoryBroker
from streams.token_writer import TokenWriter
from streams.topics import CONTROL, topic_specs
from tests.streams.test_client import FAST, responder
from tests.streams.token_fakes import broker_with_topics

CANCELLED = End(status=EndStatus.CANCELLED, finish_reason=FinishReason.ABORT)
runner = CliRunner()


def test_a_cancel_is_sent_for_its_tenant_and_told_as_one_object(monkeypatch: pytest.MonkeyPatch) -> None:
    broker = MemoryBroker()
    asyncio.run(broker.create_topics(topic_specs(2)))
    monkeypatch.setattr(cancel, "open_client", lambda *_, tenant: GeaClient(broker, ClientSettings(tenant=tenant)))
    arguments = ["cancel", "r-1", "--tenant", "acme", "--reason", "too long", "--json"]
    result = runner.invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout.splitlines()[-1]) == {
        "request_id": "r-1",
        "tenant": "acme",
        "reason": "too long",
        "is_sent": True,
    }
    (record,) = broker.records(CONTROL)
    control = read_control(record)
    assert (control.kind, control.request_id, control.tenant) == (ControlKind.CANCEL, "r-1", "acme")
    told = runner.invoke(cli.app, ["cancel", "r-1", "--name", "two"]).stderr
    assert "`gea replay r-1 --name two`" in " ".join(told.split())


def test_a_cancel_that_kafka_does_not_take_is_one_line_and_a_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = MemoryBroker()
    broker.down = True
    monkeypatch.setattr(cancel, "open_client", lambda *_, tenant: GeaClient(broker, FAST))
    result = runner.invoke(cli.app, ["cancel", "r-1", "--json"])
    assert result.exit_code == 1
    (line,) = result.stdout.splitlines()
    assert json.loads(line)["error"]["code"] == "broker_unavailable"


@asynccontextmanager
async def asked(*, ends: bool) -> AsyncIterator[tuple[MemoryBroker, GeaClient, asyncio.Event]]:
    """A client whose requests get one word, and an end if they are cancelled and `ends`; the event follows the word."""
    broker = await broker_with_topics()
    has_begun = asyncio.Event()

    async def answer(producer: Producer, reply: Reply, request_id: str, request: GenerationRequest) -> None:
        async with TokenWriter(producer, reply, request_id, epoch=Epoch(0, 1)) as writer:
            await writer.append(0, "first ", (1,))
            await broker.until(lambda: writer.num_records > 0)
            has_begun.set()
            await broker.until(lambda: bool(broker.records(CONTROL)) and ends)
            await writer.end(CANCELLED)

    async with responder(broker, answer), GeaClient(broker, FAST) as client:
        yield broker, client, has_begun


async def test_the_first_interrupt_of_a_question_cancels_it_and_shows_what_came() -> None:
    out = io.StringIO()
    async with asked(ends=True) as (broker, client, has_begun):
        stream = client.generate("hello")
        following = asyncio.create_task(ask._follow_or_cancel(client, stream, TextPrinter(out)))
        await has_begun.wait()
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(5):
            answered, is_ours = await following
    assert (answered.end.status, answered.text, is_ours) == (EndStatus.CANCELLED, "first ", True)
    assert out.getvalue() == "first "
    (record,) = broker.records(CONTROL)
    assert read_control(record).request_id == stream.request_id


async def test_the_second_interrupt_leaves_at_once() -> None:
    async with asked(ends=False) as (broker, client, has_begun):
        following = asyncio.create_task(
            ask._follow_or_cancel(client, client.generate("hello"), TextPrinter(io.StringIO()))
        )
        await has_begun.wait()
        os.kill(os.getpid(), signal.SIGINT)
        await broker.until(lambda: bool(broker.records(CONTROL)))
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(asyncio.CancelledError):
            async with asyncio.timeout(5):
                await following
    assert len(asyncio.all_tasks()) == 1


async def test_a_cancel_that_nobody_confirms_ends_in_bounded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ask, "CANCEL_S", 0.01)
    async with asked(ends=False) as (_, client, has_begun):
        following = asyncio.create_task(
            ask._follow_or_cancel(client, client.generate("hello"), TextPrinter(io.StringIO()))
        )
        await has_begun.wait()
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(CommandError, match="nobody has ended it"):
            async with asyncio.timeout(5):
                await following


async def test_a_question_that_nobody_interrupts_is_answered() -> None:
    async with responder(broker := await broker_with_topics()), GeaClient(broker, FAST) as client:
        answered, is_ours = await ask._follow_or_cancel(client, client.generate("one two"), TextPrinter(io.StringIO()))
    assert (answered.text, is_ours) == ("one two ", False)
