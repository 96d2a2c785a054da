"""Everything that a worker writes besides token streams: forwarded requests, early ends, dead letters.

A broker that is away does not lose work: each write is tried until it succeeds or its task is cancelled, while the
record that it comes from stays uncommitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec
import structlog

from schemas.codec import pack
from schemas.envelope import (
    ATTEMPT,
    CE_TYPE,
    CONTENT_TYPE,
    HOP,
    MSGPACK,
    REQUEST_ID,
    ROUTED_TYPE,
    TENANT,
    TRACEPARENT,
    Headers,
    Reply,
    RoutedRequest,
)
from schemas.errors import (
    BrokerUnavailableError,
    GeaError,
    InvalidRequestError,
    RejectedError,
    RequestCancelledError,
)
from schemas.tokens import End, EndStatus, Epoch, Failure, FinishReason, See
from streams.broker import Producer, Record
from streams.dead_letter import dead_letter
from streams.retry import RetryOrder
from streams.routing import murmur2_partition
from streams.telemetry import Metrics
from streams.token_record import end_request, point_to
from streams.topics import TOKENS
from workers.failure_policy import Decision
from workers.path import next_topic, partition_key
from workers.placement import Placement

T = TypeVar("T")
FIRST_DELAY_S = 0.1
MAX_DELAY_S = 5.0

log = structlog.get_logger(__name__)


class Outbox:
    """Writes for one worker. `num_token_partitions` is the partition count of the default token topic."""

    def __init__(
        self,
        producer: Producer,
        *,
        worker_id: str,
        num_token_partitions: int,
        metrics: Metrics | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.producer = producer
        self.metrics = metrics
        self.placement = placement
        self.worker_id = worker_id
        self.num_token_partitions = num_token_partitions

    def default_reply(self, request_id: str, start: int = 0) -> Reply:
        """Return where the stream of a request stands that chose no place of its own."""
        partition = murmur2_partition(request_id.encode(), self.num_token_partitions)
        return Reply(topic=TOKENS, partition=partition, start=start)

    async def forward(self, routed: RoutedRequest, topic: str | None = None) -> None:
        """Hand a request on to its next pool, or to `topic`. Raises InvalidRequestError if it is too large."""
        target = topic or next_topic(routed)
        partition = self.placement.partition(target, routed) if self.placement is not None else None
        await until_sent(
            lambda: self.producer.send(
                target, pack(routed), key=partition_key(routed), headers=_headers(routed), partition=partition
            )
        )

    async def retry(self, routed: RoutedRequest, decision: Decision, target: str) -> None:
        """Put a request aside until its retry is due; it then comes to topic `target` with attempt and hop + 1.

        Acknowledge its record only afterwards. Raises InvalidRequestError if it is too large.
        """
        again = msgspec.structs.replace(routed, attempt=routed.attempt + 1, hop=routed.hop + 1)
        order = RetryOrder(target=target, not_before_ms=decision.not_before_ms)
        log.info(
            "retry",
            request_id=routed.request_id,
            topic=decision.topic,
            attempt=again.attempt,
            not_before_ms=decision.not_before_ms,
        )
        headers = (*_headers(again), *order.headers())
        key = routed.request_id.encode()
        await until_sent(lambda: self.producer.send(decision.topic, pack(again), key=key, headers=headers))

    async def end(self, reply: Reply, request_id: str, error: GeaError, *, epoch: Epoch) -> Record | None:
        """End a request for `error` (see `early_end`); return the record, None if its place takes none."""
        log.info("request_refused", request_id=request_id, code=error.code, reason=error.message)
        end = early_end(error)
        if self.metrics is not None:
            self.metrics.count_end(end.finish_reason)
        try:
            return await until_sent(lambda: end_request(self.producer, reply, request_id, epoch=epoch, end=end))
        except InvalidRequestError as refusal:
            log.error("end_refused", request_id=request_id, topic=reply.topic, reason=refusal.message)
            return None

    async def point_to(self, reply: Reply, request_id: str, see: See, *, epoch: Epoch) -> None:
        """Tell a reader where the stream of a repeated request stands, if its place takes a record."""
        try:
            await until_sent(lambda: point_to(self.producer, reply, request_id, epoch=epoch, see=see))
        except InvalidRequestError as refusal:
            log.error("see_refused", request_id=request_id, topic=reply.topic, reason=refusal.message)

    async def dead_letter(self, record: Record, error: GeaError) -> None:
        """Put a record that cannot succeed aside, as it came."""
        if self.metrics is not None:
            self.metrics.dead_letters.inc()
        await until_sent(lambda: dead_letter(self.producer, record, error, self.worker_id))


async def until_sent(send: Callable[[], Awaitable[T]]) -> T:
    """Repeat a write until the broker takes it. Cancel it to give up."""
    delay_s = FIRST_DELAY_S
    while True:
        try:
            return await send()
        except BrokerUnavailableError as error:
            log.warning("send_failed", code=error.code, reason=error.message, retry_in_s=delay_s)
        await asyncio.sleep(delay_s)
        delay_s = min(2 * delay_s, MAX_DELAY_S)


def early_end(error: GeaError) -> End:
    """Return the end of a request that no run answers: as cancelled if that is the error, else as failed."""
    if isinstance(error, RequestCancelledError):
        return End(status=EndStatus.CANCELLED, finish_reason=FinishReason.ABORT, failure=failure_of(error))
    return End(status=EndStatus.FAILED, finish_reason=FinishReason.ERROR, failure=failure_of(error))


def failure_of(error: GeaError) -> Failure:
    """Return what the end record says about an error."""
    return Failure(
        code=error.code,
        message=error.message,
        field=error.field if isinstance(error, InvalidRequestError) else None,
        retry_after_s=error.retry_after_s if isinstance(error, RejectedError) else None,
    )


def _headers(routed: RoutedRequest) -> Headers:
    headers = [
        (CE_TYPE, ROUTED_TYPE.encode()),
        (CONTENT_TYPE, MSGPACK.encode()),
        (REQUEST_ID, routed.request_id.encode()),
        (TENANT, routed.tenant.encode()),
        (HOP, str(routed.hop).encode()),
        (ATTEMPT, str(routed.attempt).encode()),
    ]
    if routed.traceparent:
        headers.append((TRACEPARENT, routed.traceparent.encode()))
    return tuple(headers)
