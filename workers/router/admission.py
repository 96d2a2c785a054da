"""From a record of the public topic to a routed request: pure, every decision apart from I/O.

Whatever is refused here raises an error with a code and, where a field is to blame, the field and its range.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

from schemas.codec import Limits, convert, unpack_json_map, unpack_map
from schemas.envelope import JSON, Origin, Reply, RequestHeaders, RoutedRequest, parse_request_headers
from schemas.errors import InvalidRequestError, RejectedError
from schemas.request import GenerationRequest, validate
from schemas.worker import RouteStamp, WorkerStatus
from streams.broker import Record
from workers.wanted import check_deadline

RETRY_AFTER_S = 2.0
MAX_RETRY_AFTER_S = 60.0
GENERATION_RATE = 2.0  # requests a second that one worker is taken to finish when a caller is told to come back


@dataclass(frozen=True, slots=True, kw_only=True)
class DoorLimits:
    """What the deployment allows. `num_token_partitions` by token topic; only these may be replied to."""

    max_length: int
    max_request_bytes: int
    max_queue_depth: int
    deadline_ms: int
    max_deadline_ms: int
    num_token_partitions: dict[str, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the generation pool has to do now."""

    num_workers: int
    num_requests: int


def load_of(statuses: Iterable[WorkerStatus]) -> Load:
    """Add up the work of a pool's live workers."""
    living = list(statuses)
    return Load(num_workers=len(living), num_requests=sum(max(s.requests_in_flight, s.lag) for s in living))


def check_load(load: Load, limits: DoorLimits) -> None:
    """Refuse new work above the queue depth. Without any worker requests wait: one may be on its way.

    Raises RejectedError with the time after which to come back.
    """
    if load.num_workers and load.num_requests >= limits.max_queue_depth:
        excess = load.num_requests - limits.max_queue_depth
        retry_after_s = min(MAX_RETRY_AFTER_S, RETRY_AFTER_S + excess / (GENERATION_RATE * load.num_workers))
        raise RejectedError(
            f"{load.num_requests} requests wait, at most {limits.max_queue_depth} may", retry_after_s=retry_after_s
        )


def read_request(record: Record, limits: DoorLimits) -> GenerationRequest:
    """Decode and validate the body of a public record.

    Raises DecodeError for bytes that are no map, InvalidRequestError for a field.
    """
    size = len(record.value or b"")
    if size > limits.max_request_bytes:
        raise InvalidRequestError(f"body: {size} bytes, at most {limits.max_request_bytes} are allowed", field="body")
    headers = parse_request_headers(record.headers)
    unpack = unpack_json_map if headers.content_type == JSON else unpack_map
    body = unpack(record.value, _body_limits(limits))
    request = convert(body, GenerationRequest)
    validate(request, max_tokens=limits.max_length)
    return request


def reply_of(headers: RequestHeaders, default: Reply, limits: DoorLimits) -> Reply:
    """Return where the client wants its stream, with `start` still 0.

    Raises InvalidRequestError for a topic that is not allowed or a partition that does not exist.
    """
    topic = headers.reply_topic or default.topic
    num_partitions = limits.num_token_partitions.get(topic)
    if num_partitions is None:
        allowed = ", ".join(sorted(limits.num_token_partitions))
        raise InvalidRequestError(f"header reply_topic: {topic!r} is not allowed: {allowed}", field="reply_topic")
    if headers.reply_partition is None:
        return Reply(topic=topic, partition=default.partition % num_partitions)
    if headers.reply_partition >= num_partitions:
        raise InvalidRequestError(
            f"header reply_partition: {headers.reply_partition} is not allowed: 0 to {num_partitions - 1}",
            field="reply_partition",
        )
    return Reply(topic=topic, partition=headers.reply_partition)


def deadline_of(headers: RequestHeaders, limits: DoorLimits, now_ms: int) -> int:
    """Return the deadline as a Unix time in milliseconds.

    Raises DeadlineExceededError if it has passed, InvalidRequestError if it is too far away.
    """
    if headers.deadline_ms is None:
        return now_ms + limits.deadline_ms
    check_deadline(headers.deadline_ms, now_ms)
    if headers.deadline_ms > now_ms + limits.max_deadline_ms:
        raise InvalidRequestError(
            f"deadline_ms: at most {limits.max_deadline_ms} ms from now are allowed", field="deadline_ms"
        )
    return headers.deadline_ms


def seed_of(request_id: str, origin: Origin) -> int:
    """Return the seed of a request that brought none: the same whenever its record is routed again."""
    digest = hashlib.sha256(f"{request_id}|{origin.partition}|{origin.offset}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def stamp(
    headers: RequestHeaders,
    request: GenerationRequest,
    *,
    origin: Origin,
    reply: Reply,
    route: RouteStamp,
    deadline_ms: int,
    now_ms: int,
    traceparent: str,
) -> RoutedRequest:
    """Return the request as the pools see it."""
    return RoutedRequest(
        request_id=headers.request_id,
        request=request,
        reply=reply,
        origin=origin,
        seed=request.seed if request.seed is not None else seed_of(headers.request_id, origin),
        received_ms=now_ms,
        deadline_ms=deadline_ms,
        tenant=headers.tenant,
        route=route,
        traceparent=traceparent,
    )


def _body_limits(limits: DoorLimits) -> Limits:
    return Limits(message_bytes=limits.max_request_bytes, string_bytes=limits.max_request_bytes)
