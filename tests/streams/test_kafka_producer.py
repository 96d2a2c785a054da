"""The Kafka producer's waiting for a topic, on a client that only notes what it is given."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from schemas.errors import InvalidRequestError
from streams.kafka_producer import KafkaProducer
from streams.settings import BrokerSettings, Timeouts


class NotingClient:
    """Takes every record at once; its sender never ends."""

    def __init__(self) -> None:
        self.taken: list[bytes] = []
        self._sender = SimpleNamespace(sender_task=asyncio.get_running_loop().create_future())
        self.client = SimpleNamespace(cluster=SimpleNamespace(partitions_for_topic=lambda topic: {0}))

    async def partitions_for(self, topic: str) -> set[int]:
        return {0}

    async def send(self, topic: str, value: bytes, **options: Any) -> asyncio.Future[Any]:
        self.taken.append(value)
        written: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        written.set_result(SimpleNamespace(partition=0, offset=len(self.taken), timestamp=0))
        return written


class Topics:
    """Answers how many partitions a topic has when it is told to."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_asked = 0
        self.answers = [1]

    async def __call__(self, topic: str) -> int:
        self.num_asked += 1
        await self.may_answer.wait()
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def producer_of(client: NotingClient, topics: Topics) -> KafkaProducer:
    producer = KafkaProducer(BrokerSettings(bootstrap="127.0.0.1:1"), Timeouts(), topics)
    producer._client = client
    return producer


async def turns(number: int) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


async def test_sends_that_wait_for_a_topic_go_on_at_once_and_those_that_come_later_stay_behind_them() -> None:
    client, topics = NotingClient(), Topics()
    producer = producer_of(client, topics)
    early = [asyncio.create_task(producer.send("t", b"%d" % number)) for number in range(50)]
    await turns(3)
    topics.may_answer.set()
    late = []
    for number in range(50, 60):  # around the turn in which the answer comes
        late.append(asyncio.create_task(producer.send("t", b"%d" % number)))
        await turns(1)
    assert len(client.taken) >= 50, "those in line do not wait for one another"
    await asyncio.gather(*early, *late)
    assert client.taken == [b"%d" % number for number in range(60)]
    assert topics.num_asked == 1


async def test_who_waited_behind_a_refusal_asks_again() -> None:
    client, topics = NotingClient(), Topics()
    topics.answers = [0, 1]
    producer = producer_of(client, topics)
    sends = [asyncio.create_task(producer.send("t", b"%d" % number)) for number in range(5)]
    topics.may_answer.set()
    first, *others = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(first, InvalidRequestError)
    assert not any(isinstance(other, BaseException) for other in others)
    assert client.taken == [b"1", b"2", b"3", b"4"]
    assert topics.num_asked == 2


async def test_a_line_is_left_to_the_next_one_when_the_first_is_cancelled() -> None:
    client, topics = NotingClient(), Topics()
    producer = producer_of(client, topics)
    sends = [asyncio.create_task(producer.send("t", b"%d" % number)) for number in range(3)]
    await turns(2)
    sends[0].cancel()
    await turns(3)
    topics.may_answer.set()
    results = await asyncio.gather(*sends, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    assert client.taken == [b"1", b"2"]


async def test_a_partition_that_is_not_there_is_refused() -> None:
    client, topics = NotingClient(), Topics()
    topics.may_answer.set()
    with pytest.raises(InvalidRequestError, match="no partition 3"):
        await producer_of(client, topics).send("t", b"x", partition=3)
