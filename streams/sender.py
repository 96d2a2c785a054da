"""Writes what an application says: requests, and what it says about them later. One producer, made on first use."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from datetime import UTC, datetime

from schemas import envelope
from schemas.codec import pack
from schemas.control import Control, ControlKind
from schemas.envelope import Headers
from schemas.errors import BrokerUnavailableError
from schemas.request import GenerationRequest
from streams.broker import Broker, Producer, TopicPartition
from streams.client_options import ClientSettings
from streams.clock import now_ms
from streams.control import send_control


class Sender:
    """Writes for one client; safe to share among tasks.

    Every call raises BrokerUnavailableError, after `close` too: whoever speaks on then opens no producer anew.
    """

    def __init__(self, broker: Broker, settings: ClientSettings) -> None:
        self._broker = broker
        self._settings = settings
        self._producer: Producer | None = None
        self._lock = asyncio.Lock()
        self._is_closed = False

    async def request(
        self,
        request: GenerationRequest,
        request_id: str,
        place: TopicPartition,
        *,
        deadline_ms: int | None,
        traceparent: str | None,
    ) -> None:
        """Send a request whose stream is to stand at `place`."""
        values = {
            envelope.REQUEST_ID: request_id,
            envelope.TENANT: self._settings.tenant,
            envelope.REPLY_TOPIC: place.topic,
            envelope.REPLY_PARTITION: str(place.partition),
            envelope.CONTENT_TYPE: envelope.MSGPACK,
            envelope.CE_TYPE: envelope.REQUEST_TYPE,
            envelope.CE_ID: request_id,
            envelope.CE_SOURCE: "gea-client",
            envelope.CE_SPECVERSION: "1.0",
            envelope.CE_TIME: datetime.now(UTC).isoformat(),
        }
        if deadline_ms is not None:
            values[envelope.DEADLINE_MS] = str(deadline_ms)
        if traceparent is not None:
            values[envelope.TRACEPARENT] = traceparent
        key = (request.session_id or request_id).encode()
        producer = await self._ready()
        await producer.send(self._settings.requests_topic, pack(request), key=key, headers=_headers(values))

    async def say(self, kind: ControlKind, request_id: str, reason: str = "") -> None:
        """Say something about a request of our tenant. Raises InvalidRequestError for a reason that is too long."""
        control = Control(
            kind=kind, request_id=request_id, tenant=self._settings.tenant, sent_ms=now_ms(), reason=reason
        )
        await send_control(await self._ready(), control, topic=self._settings.control_topic)

    async def close(self) -> None:
        """Close the producer. Idempotent."""
        self._is_closed = True
        async with self._lock:  # one that is just being made is closed too
            producer, self._producer = self._producer, None
        if producer is not None:
            await producer.close()

    async def _ready(self) -> Producer:
        async with self._lock:
            if self._is_closed:
                raise BrokerUnavailableError("the client is closed")
            if self._producer is None:
                self._producer = await self._broker.producer()
            return self._producer


def _headers(values: Mapping[str, str]) -> Headers:
    return tuple((name, value.encode()) for name, value in values.items())
