"""The Python client: produce a request, follow its tokens, replay an answer.

    async with GeaClient("localhost:9092") as client:
        async for chunk in client.generate("How long can I return shoes?", session_id="s-1"):
            print(chunk.text, end="")

Any Kafka client can do the same; this one adds validation, timeouts, reconnecting and the rules of `streams.claims`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from types import TracebackType
from typing import Self, TypeVar, Unpack
from uuid import uuid4

from schemas.control import Control, ControlKind, check_control
from schemas.errors import BrokerUnavailableError, ConfigError
from schemas.request import RANGES, GenerationRequest, Message, check_id, validate
from streams.answer import Answer, ChunkStream, OpenStream, StreamPosition
from streams.broker import Broker, TopicPartition
from streams.client_options import ClientSettings, RequestOptions, as_request, check_seconds
from streams.clock import now_ms
from streams.control import keep_saying
from streams.patience import patiently
from streams.routing import murmur2_partition
from streams.sender import Sender
from streams.settings import BrokerSettings
from streams.stream_hub import HubInbox, StreamHub
from streams.token_reader import StreamReader

__all__ = ["ClientSettings", "GeaClient", "RequestOptions"]

T = TypeVar("T")
CLOSE_S = 5.0  # leaving a stream must not take long


class GeaClient:
    """Asks GEA over Kafka; safe to share among the tasks of one event loop. `async with` opens and closes it.

    Give it `host:port`, BrokerSettings, or an open Broker (which stays yours to close).
    """

    def __init__(self, broker: Broker | BrokerSettings | str, settings: ClientSettings | None = None) -> None:
        self._settings = settings or ClientSettings()
        self._is_owner = isinstance(broker, BrokerSettings | str)
        self._broker: Broker = _connect(broker) if isinstance(broker, BrokerSettings | str) else broker
        self._sender = Sender(self._broker, self._settings)
        self._hub: StreamHub | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        if self._is_owner:
            await self._broker.__aenter__()
        self._sender = Sender(self._broker, self._settings)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hub, self._hub = self._hub, None
        try:
            if hub is not None:
                await hub.close()
            await self._sender.close()
        finally:
            if self._is_owner:
                await self._broker.__aexit__(exc_type, exc, traceback)

    def generate(
        self,
        prompt: str | Sequence[Message] | GenerationRequest,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        traceparent: str | None = None,
        cancel_on_close: bool = False,
        **options: Unpack[RequestOptions],
    ) -> ChunkStream:
        """Ask for an answer and return its chunks; nothing is sent before the first is asked for.

        `prompt` may be a whole conversation or a prepared request (then without options). A `request_id` sent before
        gives the same stream again. `timeout_s` and `deadline_s`: see `ClientSettings`. `cancel_on_close` cancels the
        request when its stream is left before its end. With `reader_lease_s` the stream says, while it is open, that
        its reader is there; GEA cancels the request when nobody has said so for that long. Raises InvalidRequestError
        at once for a request that would be refused.
        """
        request = as_request(prompt, options)
        validate(request)
        id_ = uuid4().hex if request_id is None else request_id
        check_id("request_id", id_)
        check_seconds("timeout_s", timeout_s)
        check_seconds("deadline_s", deadline_s)
        deadline_s = self._settings.deadline_s if deadline_s is None else deadline_s
        if timeout_s is None:
            timeout_s = self._settings.timeout_s if deadline_s is None else deadline_s + self._settings.grace_s
        connect_s = min(self._settings.connect_s, timeout_s)

        async def open_() -> OpenStream:
            return await self._submit(request, id_, connect_s, deadline_s, traceparent)

        return ChunkStream(
            id_,
            open_,
            timeout_s,
            keep_alive=self._keep_alive(id_, request.reader_lease_s, timeout_s, at_once=False),
            cancel=(lambda: self._cancel(id_, "its reader has left", CLOSE_S)) if cancel_on_close else None,
        )

    async def complete(
        self,
        prompt: str | Sequence[Message] | GenerationRequest,
        *,
        timeout_s: float | None = None,
        deadline_s: float | None = None,
        request_id: str | None = None,
        traceparent: str | None = None,
        **options: Unpack[RequestOptions],
    ) -> Answer:
        """Ask and return the whole answer. Raises as `generate`, and RequestFailedError if the request failed.

        One that was cancelled has not failed: its answer is the text so far, with `end.status` CANCELLED.
        """
        stream = self.generate(
            prompt,
            timeout_s=timeout_s,
            deadline_s=deadline_s,
            request_id=request_id,
            traceparent=traceparent,
            **options,
        )
        async with stream:
            return await stream.answer()

    def replay(
        self,
        request_id: str,
        *,
        position: StreamPosition | None = None,
        timeout_s: float = 30.0,
        reader_lease_s: float | None = None,
    ) -> ChunkStream:
        """Read an answer again, from its position or by searching its partition from the beginning.

        Waits up to `timeout_s` for an answer that has not ended. `reader_lease_s`: keep a request that was sent with
        such a lease alive while its stream is open here. Raises StreamExpiredError if its start has left the topic,
        ResponseTimeoutError if no end came.
        """
        check_id("request_id", request_id)
        check_seconds("timeout_s", timeout_s)
        _check_lease(reader_lease_s)

        async def open_() -> OpenStream:
            return await self._retry(lambda: self._find(request_id, position), timeout_s)

        keep_alive = self._keep_alive(request_id, reader_lease_s, timeout_s, at_once=True)
        return ChunkStream(request_id, open_, timeout_s, keep_alive=keep_alive)

    async def cancel(self, request_id: str, *, reason: str = "") -> None:
        """Have a request of our tenant stopped, wherever it is: its stream ends with status `cancelled`.

        Returns when Kafka has taken it. It may come before the request itself; for one that has ended or is unknown it
        does nothing. Raises InvalidRequestError for a reason of more than 256 characters or with one that cannot be
        printed, BrokerUnavailableError.
        """
        check_control(Control(kind=ControlKind.CANCEL, request_id=request_id, reason=reason))
        await self._cancel(request_id, reason, self._settings.connect_s)

    def statistics(self) -> dict[str, int]:
        """Return the counters of the shared reader; empty before the first request."""
        return self._hub.statistics() if self._hub is not None else {}

    async def _submit(
        self,
        request: GenerationRequest,
        request_id: str,
        connect_s: float,
        deadline_s: float | None,
        traceparent: str | None,
    ) -> OpenStream:
        deadline_ms = None if deadline_s is None else now_ms() + int(deadline_s * 1000)
        inbox = await self._retry(lambda: self._follow(request_id), connect_s)

        async def send() -> None:
            await self._sender.request(
                request, request_id, inbox.place, deadline_ms=deadline_ms, traceparent=traceparent
            )

        try:
            await self._retry(send, connect_s)
        except BaseException:
            inbox.close()
            raise
        reader = StreamReader(self._broker, request_id, inbox.place, inbox.start, inbox=inbox)
        return OpenStream(reader=reader, position=_position(inbox.place, inbox.start))

    async def _cancel(self, request_id: str, reason: str, seconds: float) -> None:
        seconds = min(seconds, self._settings.connect_s)
        await self._retry(lambda: self._sender.say(ControlKind.CANCEL, request_id, reason), seconds)

    def _keep_alive(
        self, request_id: str, lease_s: float | None, seconds: float, *, at_once: bool
    ) -> Callable[[], Coroutine[None, None, None]] | None:
        """Return what says that a reader is there, None for a request without a lease."""
        if lease_s is None:
            return None
        sender = self._sender  # not `self`, nor the stream: who forgets his stream is no longer there

        async def say() -> None:
            await sender.say(ControlKind.ALIVE, request_id)

        return lambda: keep_saying(say, lease_s, seconds=seconds, at_once=at_once)

    async def _follow(self, request_id: str) -> HubInbox:
        async with self._lock:
            if self._hub is not None and not self._hub.is_running:
                await self._hub.close()
                self._hub = None
            if self._hub is None:
                hub = StreamHub(self._broker, self._settings.tokens_topic)
                await hub.start()
                self._hub = hub
        return self._hub.follow(request_id, murmur2_partition(request_id.encode(), self._hub.num_partitions))

    async def _find(self, request_id: str, position: StreamPosition | None) -> OpenStream:
        if position is not None:
            place = TopicPartition(position.topic, position.partition)
            return OpenStream(reader=StreamReader(self._broker, request_id, place, position.offset), position=position)
        topic = self._settings.tokens_topic
        num_partitions = await self._broker.partitions(topic)
        if not num_partitions:
            raise BrokerUnavailableError(f"there is no topic {topic}")
        place = TopicPartition(topic, murmur2_partition(request_id.encode(), num_partitions))
        log = await self._broker.reader({place: None})
        try:
            begin, end = (await log.begin_offsets())[place], (await log.end_offsets())[place]
        finally:
            await log.close()
        reader = StreamReader(self._broker, request_id, place, begin)
        return OpenStream(reader=reader, position=_position(place, begin), scan_until=end)

    async def _retry(self, call: Callable[[], Awaitable[T]], seconds: float) -> T:
        return await patiently(call, seconds, self._broker)


def _check_lease(lease_s: float | None) -> None:
    allowed = RANGES["reader_lease_s"]
    if lease_s is not None and lease_s not in allowed:
        raise ConfigError(f"reader_lease_s: {lease_s} is not allowed: {allowed}")


def _position(place: TopicPartition, offset: int) -> StreamPosition:
    return StreamPosition(topic=place.topic, partition=place.partition, offset=offset)


def _connect(broker: BrokerSettings | str) -> Broker:
    from streams.kafka import KafkaBroker  # aiokafka is imported only where it is used

    return KafkaBroker(BrokerSettings(bootstrap=broker) if isinstance(broker, str) else broker)
