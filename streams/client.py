"""The Python client: produce a request, follow its tokens, replay an answer.

    async with GeaClient("localhost:9092") as client:
        async for chunk in client.generate("How long can I return shoes?", session_id="s-1"):
            print(chunk.text, end="")

Any Kafka client can do the same; this one adds validation, timeouts, reconnecting and the rules of `streams.claims`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Self, TypedDict, TypeVar, Unpack
from uuid import uuid4

import msgspec

from schemas import envelope
from schemas.codec import convert, pack
from schemas.envelope import Headers
from schemas.errors import BrokerUnavailableError, ConfigError
from schemas.request import GenerationRequest, Message, Retrieval, Strategy, check_id, validate
from schemas.retrieval import Passage
from streams import topics
from streams.answer import Answer, ChunkStream, OpenStream, StreamPosition
from streams.broker import Broker, Producer, TopicPartition
from streams.clock import now_ms
from streams.routing import murmur2_partition
from streams.settings import BrokerSettings
from streams.stream_hub import HubInbox, StreamHub
from streams.token_reader import StreamReader

T = TypeVar("T")
RETRY_S = 0.1
CUT_OFF = 2  # the last attempt may take as long again: a send that is cut off may have been written
MAX_RETRY_S = 2.0


class RequestOptions(TypedDict, total=False):
    """The fields of a request beside prompt and messages; ranges in `schemas.request`."""

    system: str | None
    session_id: str | None
    max_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: dict[str, float] | None
    seed: int | None
    stop: tuple[str, ...] | None
    stop_token_ids: tuple[int, ...] | None
    logprobs: int | None
    n: int | None
    intent: str | None
    passages: tuple[Passage, ...] | None
    strategy: Strategy | None
    retrieval: Retrieval
    num_passages: int | None
    language: str | None
    explain: bool


def _check_seconds(key: str, seconds: float | None) -> None:
    if seconds is not None and not 0 < seconds <= 86_400:
        raise ConfigError(f"{key}: {seconds} is not allowed: above 0 to 86400")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientSettings:
    """`timeout_s`: how long an end is awaited. `deadline_s`: how long GEA may work on a request; None: as GEA likes.

    A request without an own deadline outlives our patience: its answer can be replayed. With one, its end is awaited
    `grace_s` longer, so that a late refusal is seen.

    Sending and connecting are tried again for `connect_s`.
    """

    tenant: str = "default"
    requests_topic: str = topics.REQUESTS
    tokens_topic: str = topics.TOKENS
    timeout_s: float = 120.0
    deadline_s: float | None = None
    grace_s: float = 1.0
    connect_s: float = 15.0

    def __post_init__(self) -> None:
        for key, low, high in (("timeout_s", 0.001, 86_400), ("grace_s", 0, 3_600), ("connect_s", 0.001, 3_600)):
            if not low <= getattr(self, key) <= high:
                raise ConfigError(f"client.{key}: {getattr(self, key)} is not allowed: {low} to {high}")
        _check_seconds("client.deadline_s", self.deadline_s)


class GeaClient:
    """Asks GEA over Kafka; safe to share among the tasks of one event loop. `async with` opens and closes it.

    Give it `host:port`, BrokerSettings, or an open Broker (which stays yours to close).
    """

    def __init__(self, broker: Broker | BrokerSettings | str, settings: ClientSettings = ClientSettings()) -> None:
        self._settings = settings
        self._is_owner = isinstance(broker, BrokerSettings | str)
        self._broker: Broker = _connect(broker) if isinstance(broker, BrokerSettings | str) else broker
        self._producer: Producer | None = None
        self._hub: StreamHub | None = None
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Self:
        if self._is_owner:
            await self._broker.__aenter__()
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        hub, producer, self._hub, self._producer = self._hub, self._producer, None, None
        try:
            if hub is not None:
                await hub.close()
            if producer is not None:
                await producer.close()
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
        **options: Unpack[RequestOptions],
    ) -> ChunkStream:
        """Ask for an answer and return its chunks; nothing is sent before the first is asked for.

        `prompt` may be a whole conversation or a prepared request (then without options). A `request_id` sent before
        gives the same stream again. `timeout_s` and `deadline_s`: see `ClientSettings`. Raises InvalidRequestError at
        once for a request that would be refused.
        """
        request = _request(prompt, options)
        validate(request)
        id_ = uuid4().hex if request_id is None else request_id
        check_id("request_id", id_)
        _check_seconds("timeout_s", timeout_s)
        _check_seconds("deadline_s", deadline_s)
        deadline_s = self._settings.deadline_s if deadline_s is None else deadline_s
        if timeout_s is None:
            timeout_s = self._settings.timeout_s if deadline_s is None else deadline_s + self._settings.grace_s
        connect_s = min(self._settings.connect_s, timeout_s)

        async def open_() -> OpenStream:
            return await self._submit(request, id_, connect_s, deadline_s, traceparent)

        return ChunkStream(id_, open_, timeout_s)

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
        """Ask and return the whole answer. Raises as `generate`, and RequestFailedError if the request failed."""
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
        self, request_id: str, *, position: StreamPosition | None = None, timeout_s: float = 30.0
    ) -> ChunkStream:
        """Read an answer again, from its position or by searching its partition from the beginning.

        Waits up to `timeout_s` for an answer that has not ended. Raises StreamExpiredError if its start has left the
        topic, ResponseTimeoutError if no end came.
        """
        check_id("request_id", request_id)

        async def open_() -> OpenStream:
            return await self._retry(lambda: self._find(request_id, position), timeout_s)

        return ChunkStream(request_id, open_, timeout_s)

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
        headers = self._headers(request_id, inbox.place, deadline_ms, traceparent)
        try:
            await self._retry(lambda: self._send(request, request_id, headers), connect_s)
        except BaseException:
            inbox.close()
            raise
        reader = StreamReader(self._broker, request_id, inbox.place, inbox.start, inbox=inbox)
        return OpenStream(reader=reader, position=_position(inbox.place, inbox.start))

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

    async def _send(self, request: GenerationRequest, request_id: str, headers: Headers) -> None:
        async with self._lock:
            if self._producer is None:
                self._producer = await self._broker.producer()
        key = (request.session_id or request_id).encode()
        await self._producer.send(self._settings.requests_topic, pack(request), key=key, headers=headers)

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
        """Call again while the broker is away, for `seconds` in all. Raises BrokerUnavailableError.

        A call that the others of this client hold up is cut off too, after CUT_OFF times that.
        """
        deadline = time.monotonic() + seconds
        pause_s = RETRY_S
        while True:
            try:
                return await self._bounded(call, deadline + (CUT_OFF - 1) * seconds - time.monotonic())
            except BrokerUnavailableError as error:
                left = deadline - time.monotonic()
                if left <= pause_s:
                    message = f"{self._broker.name} cannot be reached, tried for {seconds:g} s: {error.message}"
                    raise BrokerUnavailableError(message) from error
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)

    async def _bounded(self, call: Callable[[], Awaitable[T]], seconds: float) -> T:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                return await call()
        except TimeoutError as error:
            raise BrokerUnavailableError("no answer in time") from error

    def _headers(
        self, request_id: str, place: TopicPartition, deadline_ms: int | None, traceparent: str | None
    ) -> Headers:
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
        return tuple((name, value.encode()) for name, value in values.items())


def _request(prompt: str | Sequence[Message] | GenerationRequest, options: RequestOptions) -> GenerationRequest:
    if isinstance(prompt, GenerationRequest):
        made = msgspec.structs.replace(prompt, **options)
    elif isinstance(prompt, str):
        made = GenerationRequest(prompt=prompt, **options)
    else:
        made = GenerationRequest(messages=tuple(prompt), **options)
    return convert(msgspec.to_builtins(made), GenerationRequest)  # checks the types, which Python does not


def _position(place: TopicPartition, offset: int) -> StreamPosition:
    return StreamPosition(topic=place.topic, partition=place.partition, offset=offset)


def _connect(broker: BrokerSettings | str) -> Broker:
    from streams.kafka import KafkaBroker  # aiokafka is imported only where it is used

    return KafkaBroker(BrokerSettings(bootstrap=broker) if isinstance(broker, str) else broker)
