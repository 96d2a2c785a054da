"""What a test writes into the topics of an installation by hand, and what it finds there."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from schemas.codec import unpack
from schemas.envelope import Headers, Reply
from schemas.failure import DeadLetter
from schemas.tokens import Claim, End, Epoch, Kind, TokenRecord
from schemas.worker import Pool
from streams.claims import StreamView
from streams.client import GeaClient
from streams.routing import murmur2_partition
from streams.token_reader import decode_token
from streams.token_record import send_token
from streams.topics import DEAD_LETTER, REQUESTS, TOKENS, pool_group
from tests.flow.harness import NUM_PARTITIONS, Installation

REPLY = Reply(topic=TOKENS, partition=murmur2_partition(b"r-1", NUM_PARTITIONS))
"""Where who asked as `r-1` reads."""


async def send_raw(gea: Installation, value: bytes | None, headers: Sequence[tuple[str, str]] = ()) -> None:
    producer = await gea.broker.producer()
    encoded: Headers = tuple((name, text.encode()) for name, text in headers)
    await producer.send(REQUESTS, value, key=b"k", headers=encoded)


async def send_again(gea: Installation, topic: str) -> None:
    """Produce the one record of a topic once more, at the same place."""
    (record,) = gea.broker.records(topic)
    producer = await gea.broker.producer()
    await producer.send(topic, record.value, key=record.key, headers=record.headers, partition=record.partition)


async def claimed_by_another(gea: Installation, epoch: Epoch) -> None:
    """Let a run that nobody will hear of again claim `r-1`."""
    claim = TokenRecord(kind=Kind.CLAIM, epoch=epoch, owner="another", claim=Claim())
    await send_token(await gea.broker.producer(), REPLY, "r-1", claim)


def view_of(gea: Installation, request_id: str) -> StreamView:
    """Return the stream as every reader sees it."""
    view = StreamView()
    for record in gea.broker.records(TOKENS):
        if record.key == request_id.encode():
            view.apply(decode_token(record), record.offset)
    return view


def dead_letters(gea: Installation) -> list[DeadLetter]:
    return [unpack(record.value, DeadLetter) for record in gea.broker.records(DEAD_LETTER)]


async def end_of(gea: Installation, client: GeaClient, request_id: str) -> End:
    """Wait for the end of a request that was produced by hand."""
    async for chunk in client.replay(request_id, timeout_s=10):
        if chunk.end is not None:
            return chunk.end
    raise AssertionError("the stream stopped without an end")


async def all_committed(gea: Installation, topic: str, pool: Pool) -> None:
    """Wait until the group has committed everything that the topic holds."""

    def is_committed() -> bool:
        return all(
            (gea.broker.committed(pool_group(pool, "blue"), place) or 0) == gea.broker.log(place).end
            for place in gea.broker.places(topic)
        )

    async with asyncio.timeout(10):
        await gea.broker.until(is_committed)
