"""The client against a broker in memory, answered by a small responder that plays all pools."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

import streams
from schemas.codec import unpack
from schemas.envelope import Reply, parse_request_headers
from schemas.errors import (
    BrokerUnavailableError,
    ConfigError,
    InvalidRequestError,
    RequestFailedError,
    ResponseTimeoutError,
    StreamError,
    StreamExpiredError,
)
from schemas.request import GenerationRequest, Message, Role
from schemas.tokens import Epoch, Failure, Usage
from streams import ClientSettings, GeaClient
from streams.broker import Producer, Record, TopicPartition
from streams.memory import MemoryBroker
from streams.routing import murmur2_partition
from streams.token_record import end_request
from streams.token_writer import TokenWriter
from streams.topics import REQUESTS, TOKENS
from tests.streams.token_fakes import COMPLETED, broker_with_topics

Respond = Callable[[Producer, Reply, str, GenerationRequest], Awaitable[None]]
FAST = ClientSettings(timeout_s=5, connect_s=0.05, grace_s=0)


async def echo(producer: Producer, reply: Reply, request_id: str, request: GenerationRequest) -> None:
    """Answer with the words of the prompt, one token each."""
    async with TokenWriter(producer, reply, request_id, epoch=Epoch(0, 1)) as writer:
        for word in request.last_user_text().split():
            await writer.append(0, word + " ", (len(word),))
        await writer.end(COMPLETED)


async def refuse(producer: Producer, reply: Reply, request_id: str, request: GenerationRequest) -> None:
    failure = Failure(code="invalid_request", message="max_tokens: too many", field="max_tokens")
    await end_request(producer, reply, request_id, epoch=Epoch(0, 1), failure=failure)


async def answer_all(broker: MemoryBroker, respond: Respond) -> None:
    producer = await broker.producer()
    num_partitions = await broker.partitions(REQUESTS)
    reader = await broker.reader({TopicPartition(REQUESTS, number): 0 for number in range(num_partitions)})
    while True:
        for record in await reader.poll(timeout_ms=1000):
            headers = parse_request_headers(record.headers)
            assert headers.reply_topic is not None
            assert headers.reply_partition is not None
            reply = Reply(topic=headers.reply_topic, partition=headers.reply_partition)
            await respond(producer, reply, headers.request_id, unpack(record.value, GenerationRequest))


@asynccontextmanager
async def responder(broker: MemoryBroker, respond: Respond = echo) -> AsyncIterator[None]:
    task = asyncio.create_task(answer_all(broker, respond))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait((task,))


def sent(broker: MemoryBroker) -> list[Record]:
    return list(broker.records(REQUESTS))


async def test_chunks_come_in_order_and_the_last_has_the_end() -> None:
    broker = await broker_with_topics()
    async with responder(broker), GeaClient(broker, FAST) as client:
        stream = client.generate("how long is a day")
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.text for chunk in chunks) == "how long is a day "
        assert [chunk.end is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
        assert chunks[-1].end is not None
        assert chunks[-1].end.usage == Usage(completion_tokens=5)


async def test_the_request_carries_what_the_door_asks_for() -> None:
    broker = await broker_with_topics()
    async with responder(broker), GeaClient(broker, FAST) as client:
        answer = await client.complete("hello", session_id="s-1", max_tokens=7, deadline_s=3, request_id="r-1")
        await client.complete("no deadline of its own: GEA's counts", session_id="s-1")
    record, _ = sent(broker)
    headers = parse_request_headers(record.headers)
    assert (headers.request_id, headers.tenant, headers.reply_topic) == ("r-1", "default", TOKENS)
    assert headers.reply_partition == murmur2_partition(b"r-1", 4) == answer.position.partition
    assert headers.deadline_ms is not None
    assert parse_request_headers(sent(broker)[1].headers).deadline_ms is None
    assert record.key == b"s-1"
    assert unpack(record.value, GenerationRequest) == GenerationRequest(prompt="hello", session_id="s-1", max_tokens=7)
    assert (answer.text, answer.request_id) == ("hello ", "r-1")


async def test_a_conversation_and_a_prepared_request_are_taken() -> None:
    broker = await broker_with_topics()
    async with responder(broker), GeaClient(broker, FAST) as client:
        talk = await client.complete([Message(role=Role.USER, content="one two")])
        ready = await client.complete(GenerationRequest(prompt="three"), temperature=0.0)
    assert (talk.text, ready.text) == ("one two ", "three ")
    assert {record.key for record in sent(broker)} == {talk.request_id.encode(), ready.request_id.encode()}


@pytest.mark.parametrize("options", [{"max_tokens": 0}, {"temperature": 3.0}, {"session_id": "a b"}, {"stop": ("",)}])
async def test_a_field_out_of_range_is_refused_before_anything_is_sent(options: streams.RequestOptions) -> None:
    broker = await broker_with_topics()
    async with GeaClient(broker, FAST) as client:
        with pytest.raises(InvalidRequestError):
            client.generate("hello", **options)
        with pytest.raises(InvalidRequestError):
            client.generate("hello", request_id="no good")
        with pytest.raises(ConfigError):
            client.generate("hello", deadline_s=0)
        with pytest.raises(ConfigError):
            client.generate("hello", timeout_s=0)
    assert sent(broker) == []


@pytest.mark.parametrize("prompt", ["", "  \n", "x" * 1_048_576, "half \ud83d"])
async def test_a_prompt_that_cannot_be_answered_is_refused(prompt: str) -> None:
    broker = await broker_with_topics()
    async with GeaClient(broker, FAST) as client:
        with pytest.raises(InvalidRequestError):
            await client.complete(prompt)
    assert sent(broker) == []


async def test_a_failed_request_raises_in_complete_and_ends_the_chunks_in_generate() -> None:
    broker = await broker_with_topics()
    async with responder(broker, refuse), GeaClient(broker, FAST) as client:
        with pytest.raises(RequestFailedError) as caught:
            await client.complete("hello")
        assert (caught.value.failure_code, caught.value.field) == ("invalid_request", "max_tokens")
        chunks = [chunk async for chunk in client.generate("hello")]
        assert len(chunks) == 1
        assert chunks[0].end is not None
        assert chunks[0].end.failure is not None


async def test_without_workers_the_request_times_out_and_is_there_when_replayed_later() -> None:
    broker = await broker_with_topics()
    async with GeaClient(broker, FAST) as client:
        with pytest.raises(ResponseTimeoutError, match=r"replayed") as caught:
            await client.complete("hello again", timeout_s=0.02)
        async with responder(broker):
            answer = await client.replay(caught.value.request_id).answer()
        assert answer.text == "hello again "
        again = await client.replay(answer.request_id, position=answer.position).answer()
        assert again.text == answer.text


async def test_a_replay_whose_start_has_expired_says_so() -> None:
    broker = await broker_with_topics()
    async with responder(broker), GeaClient(broker, FAST) as client:
        answer = await client.complete("one two three four five six seven eight nine ten")
        broker.expire(TOKENS, answer.position.partition, answer.position.offset + 1)
        with pytest.raises(StreamExpiredError):
            await client.replay(answer.request_id).answer()
        with pytest.raises(StreamExpiredError):
            await client.replay(answer.request_id, position=answer.position).answer()


@pytest.mark.parametrize("timeout_s", [0, -1, float("nan"), float("inf")])
async def test_a_replay_that_could_wait_for_ever_or_not_at_all_is_refused_with_the_range(timeout_s: float) -> None:
    async with GeaClient(await broker_with_topics(), FAST) as client:
        with pytest.raises(ConfigError, match=r"timeout_s: .* is not allowed: above 0 to 86400"):
            client.replay("r1", timeout_s=timeout_s)


async def test_an_unknown_request_cannot_be_replayed() -> None:
    broker = await broker_with_topics()
    async with GeaClient(broker, FAST) as client:
        with pytest.raises(ResponseTimeoutError):
            await client.replay("unknown", timeout_s=0.01).answer()


async def test_a_broker_that_is_away_is_named_in_bounded_time_and_found_again() -> None:
    broker = await broker_with_topics()
    async with responder(broker), GeaClient(broker, FAST) as client:
        broker.down = True
        with pytest.raises(BrokerUnavailableError, match="in-memory broker cannot be reached"):
            await client.complete("hello")
        with pytest.raises(BrokerUnavailableError):
            await client.replay("r1", timeout_s=0.01).answer()
    broker.down = False
    async with responder(broker), GeaClient(broker, FAST) as client:
        assert (await client.complete("hello")).text == "hello "


async def test_an_answer_survives_a_broker_that_is_away_in_its_middle() -> None:
    broker = await broker_with_topics()
    gate = asyncio.Event()

    async def slowly(producer: Producer, reply: Reply, request_id: str, request: GenerationRequest) -> None:
        async with TokenWriter(producer, reply, request_id, epoch=Epoch(0, 1)) as writer:
            await writer.append(0, "first ", (1,))
            await gate.wait()
            await writer.append(0, "second", (2,))
            await writer.end(COMPLETED)

    async with responder(broker, slowly), GeaClient(broker, FAST) as client:
        stream = client.generate("hello")
        text = (await anext(stream)).text
        broker.down = True
        await asyncio.sleep(0)
        broker.down = False
        gate.set()
        text += "".join([chunk.text async for chunk in stream])
    assert text == "first second"


async def test_many_requests_share_one_client() -> None:
    broker = await broker_with_topics()
    async with responder(broker), GeaClient(broker, FAST) as client:
        answers = await asyncio.gather(*(client.complete(f"number {n}", session_id=f"s{n % 3}") for n in range(40)))
    assert [answer.text for answer in answers] == [f"number {n} " for n in range(40)]


async def test_stopping_early_releases_everything() -> None:
    broker = await broker_with_topics()
    async with responder(broker), GeaClient(broker, FAST) as client:
        async with client.generate("one two three") as stream:
            async for _ in stream:
                break
        assert client.statistics()["inboxes"] == 0
    assert len(asyncio.all_tasks()) == 1


async def test_a_second_reader_gets_the_same_stream() -> None:
    broker = await broker_with_topics()
    async with responder(broker), GeaClient(broker, FAST) as client:
        first = await client.complete("same for all", request_id="r-1")
        readers = (client.replay("r-1", position=first.position).answer() for _ in range(3))
        assert {answer.text for answer in await asyncio.gather(*readers)} == {"same for all "}


def test_the_package_names_what_it_exports() -> None:
    assert list(streams.__all__) == sorted(streams.__all__)
    assert all(hasattr(streams, name) for name in streams.__all__)


def test_the_client_needs_neither_torch_nor_a_broker_library_to_import() -> None:
    heavy = "torch transformers faiss aiokafka redis structlog prometheus_client"
    code = f"import streams, sys; print([name for name in {heavy.split()} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("field", "value"), [("stop", "abc"), ("temperature", "hot"), ("max_tokens", True), ("logit_bias", {1: 5.0})]
)
async def test_a_field_of_a_wrong_type_is_named_before_anything_is_sent(field: str, value: object) -> None:
    async with GeaClient(await broker_with_topics(), FAST) as client:
        with pytest.raises(InvalidRequestError) as caught:
            client.generate("x", **{field: value})  # type: ignore[arg-type]
        assert (caught.value.field or "").startswith(field)


async def test_a_stream_that_was_closed_early_says_so_and_leaves_the_client_usable() -> None:
    broker = await broker_with_topics()
    async with responder(broker), GeaClient(broker, FAST) as client:
        stream = client.generate("one two three")
        await anext(stream)
        await stream.aclose()
        with pytest.raises(StreamError, match="closed"):
            await stream.answer()
        assert client.statistics()["inboxes"] == 0
        whole = client.generate("one two")
        assert (await whole.answer()).text == "one two "
        assert (await whole.answer()).text == "one two "


async def test_many_tasks_hear_of_an_absent_broker_in_bounded_time() -> None:
    class SilentBroker(MemoryBroker):
        async def partitions(self, topic: str) -> int:
            await asyncio.Event().wait()
            raise AssertionError

    async with GeaClient(SilentBroker(), FAST) as client, asyncio.timeout(5):
        asked = [client.complete("x") for _ in range(20)]
        assert {type(error) for error in await asyncio.gather(*asked, return_exceptions=True)} == {
            BrokerUnavailableError
        }
