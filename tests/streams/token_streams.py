"""Streams of one record per text, as a reader finds them in the log."""

from __future__ import annotations

from schemas.tokens import Claim, Epoch, Kind, TokenRecord
from streams.broker import TopicPartition
from streams.memory import MemoryBroker
from streams.token_record import send_token
from tests.streams.token_fakes import COMPLETED, REPLY

EPOCH = Epoch(0, 1)
PLACE = TopicPartition(REPLY.topic, REPLY.partition)


async def write(broker: MemoryBroker, request_id: str, *texts: str, is_ended: bool = True) -> None:
    """Write a stream, one record per text."""
    producer = await broker.producer()
    seq = 0
    for text in texts:
        claim = Claim() if seq == 0 else None
        record = TokenRecord(
            kind=Kind.DELTA, epoch=EPOCH, owner="a", seq=seq, text=text, token_ids=(1,) * len(text), claim=claim
        )
        await send_token(producer, REPLY, request_id, record)
        seq += len(text)
    if is_ended:
        end = TokenRecord(kind=Kind.END, epoch=EPOCH, owner="a", seq=seq, end=COMPLETED, claim=Claim())
        await send_token(producer, REPLY, request_id, end)
