"""What the tests of the whole stack ask it, and the records that they find on its broker."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from schemas.tokens import TokenRecord
from streams.broker import TopicPartition
from streams.kafka import KafkaBroker
from streams.settings import BrokerSettings
from streams.token_reader import decode_token
from streams.topics import TOKENS
from tests.chaos.whole.conftest import WholeStack

LONG = "Tell me a long story about a mountain, a river and a bridge."


@pytest.fixture
async def broker(stack: WholeStack) -> AsyncIterator[KafkaBroker]:
    async with KafkaBroker(BrokerSettings(bootstrap=stack.state.bootstrap)) as opened:
        yield opened


async def records_of(broker: KafkaBroker, request_id: str, partition: int) -> list[TokenRecord]:
    """Return every record of a request, those that do not count too."""
    place = TopicPartition(TOKENS, partition)
    reader = await broker.reader({place: 0})
    try:
        end, found = (await reader.end_offsets())[place], []
        while reader.position(place) < end:
            found += [r for r in await reader.poll(timeout_ms=1_000) if r.key == request_id.encode()]
    finally:
        await reader.close()
    return [decode_token(record) for record in found]
