"""The ranges of what travels inside the installation: routed requests and worker statuses.

Only our own workers write them, but one with a fault, or a stranger with access, must not take the others down: what
lies outside its range is refused where it is read, as at the public door.
"""

from __future__ import annotations

import math

from schemas.envelope import RoutedRequest
from schemas.errors import InvalidRequestError
from schemas.request import MAX_NAME_CHARS, MAX_PASSAGES, check_id, check_passage, validate
from schemas.worker import WorkerStatus

MAX_TIME_MS = 2**53
MAX_PARTITION = 2**31 - 1
MAX_OFFSET = 2**63 - 1
MAX_COUNT = 2**40  # of requests and tokens; more cannot be, and would spoil every sum
MAX_PARTITIONS = 65_536
MAX_ALTERNATIVES = 1_024
MAX_TRACE_CHARS = 512


def check_routed(routed: RoutedRequest) -> None:
    """Check every field of a request between the pools. Raises InvalidRequestError with the field and its range."""
    check_id("request_id", routed.request_id)
    check_id("tenant", routed.tenant)
    validate(routed.request)
    _number("seed", routed.seed, MAX_OFFSET)
    _number("received_ms", routed.received_ms, MAX_TIME_MS)
    _number("deadline_ms", routed.deadline_ms, MAX_TIME_MS)
    _number("hop", routed.hop, MAX_PARTITION)
    _number("attempt", routed.attempt, MAX_PARTITION)
    _number("reply.partition", routed.reply.partition, MAX_PARTITION)
    _number("reply.start", routed.reply.start, MAX_OFFSET)
    _number("origin.partition", routed.origin.partition, MAX_PARTITION)
    _number("origin.offset", routed.origin.offset, MAX_OFFSET)
    _number("route.version", routed.route.version, MAX_OFFSET)
    _length("traceparent", routed.traceparent or "", MAX_TRACE_CHARS)
    _check_results(routed)


def check_status(status: WorkerStatus) -> None:
    """Check every number of a status. Raises InvalidRequestError with the field and its range."""
    for field in ("requests_in_flight", "tokens_in_flight", "tokens_queued", "num_queued", "num_handled", "lag"):
        _number(field, getattr(status, field), MAX_COUNT)
    for field in ("updated_ms", "started_ms", "last_step_ms"):
        _number(field, getattr(status, field), MAX_TIME_MS)
    for field in ("step_ms", "request_ms", "error_rate", "kv_usage"):
        _finite(field, getattr(status, field))
    _number("num_partitions", status.num_partitions, MAX_PARTITIONS)
    _number("partitions", len(status.partitions), MAX_PARTITIONS)
    for partition in status.partitions:
        _number("partitions", partition, MAX_PARTITION)
    for field in ("worker_id", "colour", "host", "model"):
        _length(field, getattr(status, field), MAX_NAME_CHARS)


def _check_results(routed: RoutedRequest) -> None:
    """Check what the stages have added."""
    if (intent := routed.intent) is not None:
        for field in ("intent", "language", "model", "failure"):
            _length(f"intent.{field}", getattr(intent, field), MAX_NAME_CHARS)
        for field in ("confidence", "complexity", "took_ms"):
            _finite(f"intent.{field}", getattr(intent, field))
        _number("intent.alternatives", len(intent.alternatives), MAX_ALTERNATIVES)
        for share in intent.alternatives.values():
            _finite("intent.alternatives", share)
    if (retrieval := routed.retrieval) is not None:
        _number("retrieval.passages", len(retrieval.passages), MAX_PASSAGES)
        for passage in retrieval.passages:
            check_passage(passage)
        _number("retrieval.index_version", retrieval.index_version, MAX_OFFSET)
        _finite("retrieval.took_ms", retrieval.took_ms)
        _length("retrieval.failure", retrieval.failure, MAX_NAME_CHARS)


def _number(field: str, value: int, high: int) -> None:
    if not 0 <= value <= high:
        raise InvalidRequestError(f"{field}: {value} is not allowed: 0 to {high}", field=field)


def _finite(field: str, value: float) -> None:
    if not (math.isfinite(value) and value >= 0):
        raise InvalidRequestError(f"{field}: {value} is not allowed: a finite number of at least 0", field=field)


def _length(field: str, value: str, high: int) -> None:
    if len(value) > high:
        raise InvalidRequestError(f"{field}: {len(value)} characters, at most {high} are allowed", field=field)
