"""The client, the token writer and the readers on real Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from ops.embedded import EmbeddedKafka, MissingPrerequisiteError
from schemas.codec import unpack
from schemas.envelope import Reply, parse_request_headers
from schemas.errors import BrokerUnavailableError, ResponseTimeoutError
from schemas.request import GenerationRequest
from schemas.tokens import Epoch
from streams import BrokerSettings, ClientSettings, GeaClient
from streams.broker import TopicPartition
from streams.kafka import KafkaBroker
from streams.token_reader import read_view
from streams.token_writer import TokenWriter
from streams.topics import REQUESTS, TOKENS, topic_specs
from tests.streams.token_fakes import COMPLETED

pytestmark = pytest.mark.kafka


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[KafkaBroker]:
    server = EmbeddedKafka(tmp_path)
    try:
        await server.start()
    except MissingPrerequisiteError as error:
        pytest.skip(str(error))
    try:
        async with KafkaBroker(BrokerSettings(bootstrap=server.bootstrap)) as broker:
            await broker.create_topics(topic_specs(2))
            yield broker
    finally:
        await server.stop()


async def answer_all(broker: KafkaBroker) -> None:
    """Answer each request with its words; the second half by a take-over."""
    producer = await broker.producer()
    reader = await broker.reader({TopicPartition(REQUESTS, number): 0 for number in range(2)})
    try:
        while True:
            for record in await reader.poll(timeout_ms=500):
                headers = parse_request_headers(record.headers)
                reply = Reply(topic=TOKENS, partition=headers.reply_partition or 0)
                words = unpack(record.value, GenerationRequest).last_user_text().split()
                first = TokenWriter(producer, reply, headers.request_id, epoch=Epoch(0, 1))
                await first.append(0, words[0] + " ", (0,))
                async with TokenWriter(producer, reply, headers.request_id, epoch=Epoch(0, 2)) as second:
                    await first.close()
                    offset = await second.claim()
                    view = await read_view(broker, reply, headers.request_id, until=offset + 1, timeout_s=10)
                    assert view.is_owned_by(second.epoch, second.owner)
                    second.resume(view)
                    for word in words[view.next_seq() :]:
                        await second.append(0, word + " ", (len(word),))
                    await second.end(COMPLETED)
    finally:
        await reader.close()
        await producer.close()


async def test_generate_replay_and_time_out_on_real_kafka(broker: KafkaBroker) -> None:
    settings = ClientSettings(timeout_s=20)
    async with GeaClient(broker, settings) as client:
        with pytest.raises(ResponseTimeoutError) as caught:
            await client.complete("nobody is here", timeout_s=2)
        responder = asyncio.create_task(answer_all(broker))
        try:
            late = await client.replay(caught.value.request_id, timeout_s=20).answer()
            assert late.text == "nobody is here "
            prompts = [f"request number {number}" for number in range(10)]
            answers = await asyncio.gather(*(client.complete(prompt) for prompt in prompts))
            assert [answer.text for answer in answers] == [f"{prompt} " for prompt in prompts]
            again = await client.replay(answers[3].request_id, position=answers[3].position).answer()
            assert again.end == answers[3].end
        finally:
            responder.cancel()
            await asyncio.wait((responder,))


async def test_kafka_that_is_down_is_named_in_bounded_time(unused_tcp_port: int) -> None:
    settings = ClientSettings(connect_s=1)
    async with asyncio.timeout(30), GeaClient(f"127.0.0.1:{unused_tcp_port}", settings) as client:
        with pytest.raises(BrokerUnavailableError, match=f"127.0.0.1:{unused_tcp_port} cannot be reached"):
            await client.complete("hello")
