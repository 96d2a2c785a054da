"""Saying something about a request that is on its way: records of the topic of control, written and read.

Any Kafka client can write them, as MessagePack or, where the header `content-type` says so, as JSON. Who follows them
is `streams.control_follower`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from schemas.codec import Limits, convert, pack, unpack_json_map, unpack_map
from schemas.control import Control, check_control
from schemas.envelope import CE_TYPE, CONTENT_TYPE, CONTROL_TYPE, JSON, MSGPACK, Headers, check_type, header
from schemas.errors import BrokerUnavailableError
from streams.broker import Producer, Record
from streams.topics import CONTROL

LIMITS = Limits(message_bytes=4_096)  # ids of 128 characters and a reason of 256 are far below
SAYINGS_PER_LEASE = 3  # one may be late and one lost
HEADERS: Headers = ((CE_TYPE, CONTROL_TYPE.encode()), (CONTENT_TYPE, MSGPACK.encode()))


async def send_control(producer: Producer, control: Control, *, topic: str = CONTROL) -> Record:
    """Write one saying. Raises InvalidRequestError for a field out of range, BrokerUnavailableError."""
    check_control(control)
    return await producer.send(topic, pack(control), key=control.request_id.encode(), headers=HEADERS)


def read_control(record: Record) -> Control:
    """Decode and check one saying. Raises DecodeError or InvalidRequestError."""
    check_type(record.headers, CONTROL_TYPE)
    unpack = unpack_json_map if header(record.headers, CONTENT_TYPE) == JSON else unpack_map
    control = convert(unpack(record.value, LIMITS), Control)
    check_control(control)
    return control


async def keep_saying(say: Callable[[], Awaitable[object]], lease_s: float, *, seconds: float, at_once: bool) -> None:
    """Call `say` three times in a lease, for `seconds` in all. While the broker is away nothing is heard: go on."""
    end = time.monotonic() + seconds
    due = time.monotonic() + (0.0 if at_once else lease_s / SAYINGS_PER_LEASE)
    while due < end:
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        due = time.monotonic() + lease_s / SAYINGS_PER_LEASE
        try:
            await say()
        except BrokerUnavailableError:
            continue
