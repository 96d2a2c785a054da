"""What the tests of token streams share: a broker with the topics, and producers that fail or wait on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from schemas.envelope import Reply
from schemas.errors import BrokerUnavailableError
from schemas.tokens import End, EndStatus, FinishReason, TokenRecord
from streams.broker import Producer, Record
from streams.memory import MemoryBroker
from streams.token_reader import decode_token
from streams.topics import TOKENS, topic_specs

REPLY = Reply(topic=TOKENS, partition=1)
COMPLETED = End(status=EndStatus.COMPLETED, finish_reason=FinishReason.STOP)


async def broker_with_topics(partitions: int = 4) -> MemoryBroker:
    broker = MemoryBroker()
    await broker.create_topics(topic_specs(partitions))
    return broker


def tokens_of(broker: MemoryBroker, request_id: str) -> list[TokenRecord]:
    return [decode_token(record) for record in broker.records(TOKENS) if record.key == request_id.encode()]


class GatedProducer:
    """Sends when `gate` is set; `is_broken` makes every send fail."""

    def __init__(self, inner: Producer) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.is_broken = False
        self.num_waiting = 0
        self._inner = inner

    async def send(self, topic: str, value: bytes | None, **place: Any) -> Record:
        self.num_waiting += 1
        await self.gate.wait()
        self.num_waiting -= 1
        if self.is_broken:
            raise BrokerUnavailableError("broken on purpose")
        return await self._inner.send(topic, value, **place)

    async def close(self) -> None:
        await self._inner.close()


async def until(is_true: Callable[[], bool]) -> None:
    """Let other tasks run until a condition holds."""
    async with asyncio.timeout(5):
        while not is_true():  # noqa: ASYNC110 - one turn of the loop each, no pause
            await asyncio.sleep(0)
