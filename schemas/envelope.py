"""Record headers, and the body that travels between the pools.

Public requests carry few headers, so that any Kafka client can produce them: only `request_id` is needed.
Between the pools everything that the next stage needs stands in the body (`RoutedRequest`).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from schemas.errors import InvalidRequestError, UnsupportedVersionError
from schemas.intent import IntentResult
from schemas.request import GenerationRequest, check_id
from schemas.retrieval import RetrievalResult
from schemas.worker import RouteStamp

Headers = tuple[tuple[str, bytes], ...]

REQUEST_ID = "request_id"
TENANT = "tenant"
REPLY_TOPIC = "reply_topic"
REPLY_PARTITION = "reply_partition"
DEADLINE_MS = "deadline_ms"
HOP = "hop"
ATTEMPT = "attempt"
TARGET = "target"
NOT_BEFORE_MS = "not_before_ms"
REDRIVEN_FROM = "redriven_from"
TRACEPARENT = "traceparent"
CONTENT_TYPE = "content-type"
CE_TYPE = "ce_type"
CE_ID = "ce_id"
CE_SOURCE = "ce_source"
CE_SPECVERSION = "ce_specversion"
CE_TIME = "ce_time"

MSGPACK = "application/msgpack"
JSON = "application/json"

REQUEST_TYPE = "gea.request.v1"
ROUTED_TYPE = "gea.routed-request.v1"
TOKEN_TYPE = "gea.token.v1"
DOCUMENT_TYPE = "gea.document.v1"
WORKER_TYPE = "gea.worker.v1"
ROUTES_TYPE = "gea.routes.v1"
DEAD_LETTER_TYPE = "gea.dead-letter.v1"
CONTROL_TYPE = "gea.control.v1"
REDRIVEN_TYPE = "gea.redriven.v1"


class RequestHeaders(msgspec.Struct, frozen=True, kw_only=True):
    """The headers of a public request, checked. `deadline_ms` is a Unix time in milliseconds."""

    request_id: str
    tenant: str = "default"
    reply_topic: str | None = None
    reply_partition: int | None = None
    deadline_ms: int | None = None
    traceparent: str | None = None
    content_type: str = MSGPACK


class Reply(msgspec.Struct, frozen=True, kw_only=True):
    """Where the token stream of a request stands. No record of it lies before `start`."""

    topic: str
    partition: int
    start: int = 0


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """The record of `gea.requests` that a request came from."""

    partition: int
    offset: int


class RoutedRequest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A request on its way through the pools, with what each stage has added.

    `seed` is always set by the router, so that every run of the request draws the same numbers. `attempt` counts the
    retries after an error so far, `hop` every time that the request was produced again.
    """

    request_id: str
    request: GenerationRequest
    reply: Reply
    origin: Origin
    seed: int
    received_ms: int
    deadline_ms: int
    tenant: str = "default"
    hop: int = 0
    attempt: int = 0
    route: RouteStamp = RouteStamp()
    intent: IntentResult | None = None
    retrieval: RetrievalResult | None = None
    traceparent: str | None = None


def header(headers: Iterable[tuple[str, bytes]], name: str) -> str | None:
    """Return the last value of a header as text, or None.

    Raises InvalidRequestError if it is no UTF-8.
    """
    values = [value for key, value in headers if key == name]
    if not values:
        return None
    try:
        return values[-1].decode()
    except UnicodeDecodeError as error:
        raise InvalidRequestError(f"header {name}: not UTF-8", field=name) from error


def check_type(headers: Iterable[tuple[str, bytes]], expected: str) -> None:
    """Refuse a record whose `ce_type` is another type or major version than `expected`; an absent one is accepted.

    Raises UnsupportedVersionError.
    """
    found = header(headers, CE_TYPE)
    if found is not None and found != expected:
        raise UnsupportedVersionError(f"{CE_TYPE}: {found!r} is not known here, expected {expected!r}", field=CE_TYPE)


def parse_request_headers(headers: Headers) -> RequestHeaders:
    """Check the headers of a public request.

    Raises InvalidRequestError with the header's name; `request_id` missing or malformed is refused too.
    """
    check_type(headers, REQUEST_TYPE)
    request_id = header(headers, REQUEST_ID)
    if request_id is None:
        raise InvalidRequestError(f"header {REQUEST_ID}: missing", field=REQUEST_ID)
    check_id(REQUEST_ID, request_id)
    tenant = header(headers, TENANT) or "default"
    check_id(TENANT, tenant)
    content_type = header(headers, CONTENT_TYPE) or MSGPACK
    if content_type not in (MSGPACK, JSON):
        raise InvalidRequestError(f"header {CONTENT_TYPE}: {MSGPACK} or {JSON} is allowed", field=CONTENT_TYPE)
    return RequestHeaders(
        request_id=request_id,
        tenant=tenant,
        reply_topic=header(headers, REPLY_TOPIC),
        reply_partition=whole_number(headers, REPLY_PARTITION, 2**31 - 1),
        deadline_ms=whole_number(headers, DEADLINE_MS, 2**53),
        traceparent=header(headers, TRACEPARENT),
        content_type=content_type,
    )


def whole_number(headers: Headers, name: str, high: int) -> int | None:
    """Return a header as a number of 0 to `high`, None if it is absent. Raises InvalidRequestError."""
    text = header(headers, name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= high):
        raise InvalidRequestError(f"header {name}: a whole number of 0 to {high} is allowed", field=name)
    return int(text)
