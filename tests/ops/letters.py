"""Dead letters for tests, as workers write them."""

from __future__ import annotations

from schemas.codec import pack
from schemas.envelope import Headers, Origin, Reply, RoutedRequest
from schemas.errors import DecodeError, GeaError, InternalError
from schemas.request import GenerationRequest
from streams.broker import Record
from streams.dead_letter import dead_letter
from streams.memory import MemoryBroker
from streams.topics import REQUESTS, TOKENS, topic_specs

PARTITIONS = 2
ROUTED = RoutedRequest(
    request_id="r-routed",
    request=GenerationRequest(prompt="hello", session_id="s-1"),
    reply=Reply(topic=TOKENS, partition=0),
    origin=Origin(partition=0, offset=0),
    seed=7,
    received_ms=1,
    deadline_ms=2,
    tenant="acme",
    hop=3,
)
PUBLIC: Headers = (
    ("request_id", b"r-1"),
    ("tenant", b"acme"),
    ("deadline_ms", b"5"),
    ("reply_topic", b"gea.tokens.acme"),
    ("reply_partition", b"1"),
    ("content-type", b"application/msgpack"),
)
BODY = pack(GenerationRequest(prompt="hello"))
FAULT = InternalError("boom")
UNREADABLE = DecodeError("not MessagePack")


class Grave:
    """A broker with the topics, and letters in it."""

    def __init__(self, broker: MemoryBroker) -> None:
        self.broker = broker

    @classmethod
    async def dig(cls) -> Grave:
        broker = MemoryBroker()
        await broker.create_topics(topic_specs(PARTITIONS))
        return cls(broker)

    async def bury(
        self,
        value: bytes | None = BODY,
        headers: Headers = PUBLIC,
        *,
        topic: str = REQUESTS,
        key: bytes | None = b"r-1",
        error: GeaError = FAULT,
    ) -> Record:
        """Produce a record and put it aside."""
        producer = await self.broker.producer()
        record = await producer.send(topic, value, key=key, headers=headers)
        await dead_letter(producer, record, error, "worker-1")
        return record
