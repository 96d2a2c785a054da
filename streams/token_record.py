"""Writes single records of a token stream: for a run, and for requests that end or are pointed elsewhere without one.

It does not know whether a record will count; only the log does (`streams.claims`).
"""

from __future__ import annotations

from uuid import uuid4

import msgspec

from schemas.codec import pack
from schemas.envelope import CE_TYPE, TOKEN_TYPE, Headers, Reply
from schemas.tokens import Claim, End, EndStatus, Epoch, Failure, FinishReason, Kind, See, TokenRecord
from streams.broker import Producer, Record

TOKEN_HEADERS: Headers = ((CE_TYPE, TOKEN_TYPE.encode()),)


def new_owner() -> str:
    """Return a nonce for one run."""
    return uuid4().hex[:16]


async def send_token(producer: Producer, reply: Reply, request_id: str, record: TokenRecord) -> Record:
    """Write one record of a token stream. Raises BrokerUnavailableError."""
    return await producer.send(
        reply.topic, pack(record), key=request_id.encode(), headers=TOKEN_HEADERS, partition=reply.partition
    )


async def end_request(
    producer: Producer,
    reply: Reply,
    request_id: str,
    *,
    epoch: Epoch,
    failure: Failure | None = None,
    end: End | None = None,
) -> Record:
    """End a request that has no run, in one record with its own claim: as failed for `failure`, or with a given `end`.

    Raises BrokerUnavailableError: then the request has not surely ended.
    """
    if end is None:
        end = End(status=EndStatus.FAILED, finish_reason=FinishReason.ERROR, failure=failure)
    end = msgspec.structs.replace(end, num_records=1)
    record = TokenRecord(kind=Kind.END, epoch=epoch, owner=new_owner(), claim=Claim(), end=end)
    return await send_token(producer, reply, request_id, record)


async def point_to(producer: Producer, reply: Reply, request_id: str, *, epoch: Epoch, see: See) -> Record:
    """Tell the readers at `reply` where the stream of a repeated request stands. Raises BrokerUnavailableError."""
    record = TokenRecord(kind=Kind.SEE, epoch=epoch, owner=new_owner(), see=see)
    return await send_token(producer, reply, request_id, record)
