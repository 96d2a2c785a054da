"""What the client says about its requests: cancel them, leave them, be there."""

from __future__ import annotations

import asyncio
import gc

import pytest
from structlog.testing import capture_logs

from schemas.control import Control, ControlKind
from schemas.envelope import Reply
from schemas.errors import BrokerUnavailableError, ConfigError, InvalidRequestError, ResponseTimeoutError
from schemas.request import GenerationRequest
from schemas.tokens import End, EndStatus, Epoch, FinishReason
from streams import ClientSettings, GeaClient
from streams.broker import Producer
from streams.control import read_control
from streams.memory import MemoryBroker
from streams.memory_clients import MemoryProducer
from streams.token_writer import TokenWriter
from streams.topics import CONTROL, REQUESTS, topic_specs
from tests.streams.test_client import FAST, responder
from tests.streams.token_fakes import broker_with_topics, until

CANCELLED = End(status=EndStatus.CANCELLED, finish_reason=FinishReason.ABORT)


def said(broker: MemoryBroker, kind: ControlKind) -> list[Control]:
    found = [read_control(record) for record in broker.records(CONTROL)]
    return [control for control in found if control.kind is kind]


async def begin(producer: Producer, reply: Reply, request_id: str, request: GenerationRequest) -> None:
    """Write the first word and stop there."""
    async with TokenWriter(producer, reply, request_id, epoch=Epoch(0, 1)) as writer:
        await writer.append(0, "first ", (1,))
        await until(lambda: writer.num_records > 0)


async def cancelled(producer: Producer, reply: Reply, request_id: str, request: GenerationRequest) -> None:
    async with TokenWriter(producer, reply, request_id, epoch=Epoch(0, 1)) as writer:
        await writer.append(0, "first ", (1,))
        await writer.end(CANCELLED)


async def test_a_cancel_says_which_request_of_which_tenant_and_why() -> None:
    broker = await broker_with_topics()
    async with GeaClient(broker, ClientSettings(tenant="acme")) as client:
        await client.cancel("r-1", reason="enough")
    (control,) = said(broker, ControlKind.CANCEL)
    assert (control.request_id, control.tenant, control.reason) == ("r-1", "acme", "enough")
    assert control.sent_ms > 0
    assert broker.records(CONTROL)[0].key == b"r-1"


@pytest.mark.parametrize(
    ("request_id", "reason", "field"),
    [
        ("no good", "", "request_id"),
        ("r", "x" * 257, "reason"),
        ("r", "two\nlines", "reason"),
        ("r", "red \x1b[31m", "reason"),
        ("r", "\udcff", "reason"),
    ],
)
async def test_a_cancel_that_cannot_count_is_refused_before_it_is_sent(
    request_id: str, reason: str, field: str
) -> None:
    broker = await broker_with_topics()
    async with GeaClient(broker, FAST) as client:
        with pytest.raises(InvalidRequestError) as caught:
            await client.cancel(request_id, reason=reason)
    assert caught.value.field == field
    assert broker.records(CONTROL) == []


async def test_a_cancel_while_the_broker_is_away_fails_in_bounded_time_with_its_reason() -> None:
    broker = await broker_with_topics()
    async with GeaClient(broker, FAST) as client:
        broker.down = True
        async with asyncio.timeout(5):
            with pytest.raises(BrokerUnavailableError, match="in-memory broker cannot be reached"):
                await client.cancel("r-1")
        broker.down = False
        await client.cancel("r-1")
    assert len(said(broker, ControlKind.CANCEL)) == 1


async def test_a_cancelled_request_has_not_failed_its_answer_is_the_text_so_far() -> None:
    broker = await broker_with_topics()
    async with responder(broker, cancelled), GeaClient(broker, FAST) as client:
        answer = await client.complete("hello")
        chunks = [chunk async for chunk in client.generate("hello")]
    assert (answer.text, answer.end.status) == ("first ", EndStatus.CANCELLED)
    assert chunks[-1].end is not None
    assert chunks[-1].end.status is EndStatus.CANCELLED


async def test_a_stream_that_is_left_early_goes_on_unless_it_was_asked_for_otherwise() -> None:
    broker = await broker_with_topics()
    async with responder(broker, begin), GeaClient(broker, FAST) as client:
        for cancel_on_close in (False, True):
            async with client.generate(
                "hello", request_id=f"r-{cancel_on_close}", cancel_on_close=cancel_on_close
            ) as s:
                await anext(s)
    (control,) = said(broker, ControlKind.CANCEL)
    assert (control.request_id, control.reason) == ("r-True", "its reader has left")


async def test_a_stream_that_is_left_by_an_error_or_for_lack_of_time_is_cancelled_too() -> None:
    broker = await broker_with_topics()
    async with responder(broker, begin), GeaClient(broker, FAST) as client:
        with pytest.raises(ZeroDivisionError):
            async with client.generate("hello", request_id="r-1", cancel_on_close=True) as stream:
                async for _ in stream:
                    raise ZeroDivisionError
        with pytest.raises(ResponseTimeoutError):
            async with client.generate("hello", request_id="r-2", cancel_on_close=True, timeout_s=0.02) as stream:
                await stream.answer()
    assert [control.request_id for control in said(broker, ControlKind.CANCEL)] == ["r-1", "r-2"]


async def test_a_cancelled_task_cancels_its_request_in_leaving() -> None:
    broker = await broker_with_topics()
    async with responder(broker, begin), GeaClient(broker, FAST) as client:
        has_text = asyncio.Event()

        async def read() -> None:
            async with client.generate("hello", request_id="r-1", cancel_on_close=True) as stream:
                async for _ in stream:
                    has_text.set()

        task = asyncio.create_task(read())
        await has_text.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert [control.request_id for control in said(broker, ControlKind.CANCEL)] == ["r-1"]


async def test_a_stream_that_ended_or_was_never_begun_is_not_cancelled() -> None:
    broker = await broker_with_topics()
    async with responder(broker), GeaClient(broker, FAST) as client:
        async with client.generate("hello", cancel_on_close=True) as stream:
            await stream.answer()
        async with client.generate("hello", cancel_on_close=True):
            pass
        broker.down = True
        stream = client.generate("hello", cancel_on_close=True)
        with pytest.raises(BrokerUnavailableError):
            await anext(stream)
        broker.down = False
        await stream.aclose()
    assert said(broker, ControlKind.CANCEL) == []


async def test_leaving_while_the_broker_is_away_raises_nothing_and_takes_bounded_time() -> None:
    broker = await broker_with_topics()
    with capture_logs() as logs:
        async with responder(broker, begin), GeaClient(broker, FAST) as client:
            stream = client.generate("hello", cancel_on_close=True)
            await anext(stream)
            broker.down = True
            async with asyncio.timeout(5):
                await stream.aclose()
            broker.down = False
    assert "request not cancelled" in [line["event"] for line in logs]


async def test_a_stream_that_outlives_its_client_opens_no_producer_anew() -> None:
    class Counting(MemoryBroker):
        num_producers = 0

        async def producer(self) -> MemoryProducer:
            self.num_producers += 1
            return await super().producer()

    broker = Counting()
    await broker.create_topics(topic_specs(4))
    async with responder(broker, begin):
        async with GeaClient(broker, FAST) as client:
            stream = client.generate("hello", reader_lease_s=1, cancel_on_close=True)
            await anext(stream)
        before = broker.num_producers
        with capture_logs() as logs:
            async with asyncio.timeout(5):
                await stream.aclose()
        assert broker.num_producers == before
        assert any("the client is closed" in line.get("error", "") for line in logs)
        async with client:  # opened anew
            await client.cancel("r-1")
    assert len(said(broker, ControlKind.CANCEL)) == 1


async def test_a_reader_with_a_lease_says_that_he_is_there_while_his_stream_is_open() -> None:
    broker = await broker_with_topics()
    async with responder(broker, begin), GeaClient(broker, ClientSettings(tenant="acme", timeout_s=5)) as client:
        async with client.generate("hello", request_id="r-1", reader_lease_s=1) as stream:
            await anext(stream)
            async with asyncio.timeout(5):
                await broker.until(lambda: len(said(broker, ControlKind.ALIVE)) >= 1)
        alive = said(broker, ControlKind.ALIVE)
        assert {(control.request_id, control.tenant) for control in alive} == {("r-1", "acme")}
        assert not any(task.get_name().startswith("alive") for task in asyncio.all_tasks())
    assert len(asyncio.all_tasks()) == 1
    assert len(broker.records(REQUESTS)) == 1


async def test_who_drops_his_stream_without_closing_it_is_no_longer_there() -> None:
    broker = await broker_with_topics()
    async with responder(broker, begin), GeaClient(broker, FAST) as client:
        stream = client.generate("hello", reader_lease_s=1)
        await anext(stream)
        assert "alive" in names()
        del stream
        gc.collect()
        await until(lambda: "alive" not in names())


async def test_a_second_reader_keeps_a_request_alive_by_replaying_it_with_its_lease() -> None:
    broker = await broker_with_topics()
    async with responder(broker, begin), GeaClient(broker, FAST) as client:
        await anext(client.generate("hello", request_id="r-1"))
        second = client.replay("r-1", reader_lease_s=60)
        await anext(second)
        await until(lambda: len(said(broker, ControlKind.ALIVE)) == 1)
        await second.aclose()
        with pytest.raises(ConfigError, match="reader_lease_s"):
            client.replay("r-1", reader_lease_s=0.5)
        with pytest.raises(InvalidRequestError, match="reader_lease_s"):
            client.generate("hello", reader_lease_s=0.5)


def names() -> set[str]:
    return {task.get_name().partition(" ")[0] for task in asyncio.all_tasks()}
