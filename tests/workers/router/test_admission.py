"""The router's decisions: what is read, refused, and stamped."""

from __future__ import annotations

import msgpack
import pytest

from schemas.codec import pack
from schemas.envelope import Origin, Reply, RequestHeaders, parse_request_headers
from schemas.errors import (
    DeadlineExceededError,
    DecodeError,
    InvalidRequestError,
    RejectedError,
    UnsupportedVersionError,
)
from schemas.request import GenerationRequest
from schemas.worker import Pool, RouteStamp, WorkerState, WorkerStatus
from streams.broker import Record
from workers.router.admission import (
    DoorLimits,
    Load,
    check_load,
    deadline_of,
    load_of,
    read_request,
    reply_of,
    seed_of,
    stamp,
)

LIMITS = DoorLimits(
    max_length=512,
    max_request_bytes=65_536,
    max_queue_depth=10,
    deadline_ms=120_000,
    max_deadline_ms=600_000,
    num_token_partitions={"gea.tokens": 4, "gea.tokens.acme": 2},
)
DEFAULT = Reply(topic="gea.tokens", partition=3)


def record(value: bytes | None, **headers: str) -> Record:
    named = {"request_id": "r-1", **headers}
    return Record(
        topic="gea.requests",
        partition=0,
        offset=7,
        timestamp_ms=0,
        key=None,
        value=value,
        headers=tuple((name.replace("content_type", "content-type"), text.encode()) for name, text in named.items()),
    )


def test_msgpack_body_is_read() -> None:
    request = GenerationRequest(prompt="hello", max_tokens=3)
    assert read_request(record(pack(request)), LIMITS) == request


def test_json_body_is_read_when_the_header_says_so() -> None:
    raw = '{"prompt": "你好", "stop": ["x"], "unknown": 1}'.encode()
    read = read_request(record(raw, content_type="application/json"), LIMITS)
    assert read == GenerationRequest(prompt="你好", stop=("x",))


@pytest.mark.parametrize(
    "raw", [None, b"", b"\xc1", b"{}", msgpack.packb([1, 2]), msgpack.packb("text"), b"\x81\xa6prompt\xa1"]
)
def test_undecodable_body_is_a_decode_error(raw: bytes | None) -> None:
    with pytest.raises(DecodeError):
        read_request(record(raw), LIMITS)


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"prompt": ', b"\xff", b"[" * 5000])
def test_undecodable_json_is_a_decode_error(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        read_request(record(raw, content_type="application/json"), LIMITS)


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n"}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "messages": [{"role": "user", "content": "y"}]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 513}, "max_tokens"),
        ({"prompt": "x", "max_tokens": 10**9}, "max_tokens"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens"),
        ({"prompt": "x", "temperature": float("nan")}, "temperature"),
        ({"prompt": "x", "session_id": "no spaces"}, "session_id"),
        ({"prompt": "x", "session_id": ""}, "session_id"),
        ({"prompt": "x", "session_id": "s" * 129}, "session_id"),
        ({"prompt": "x", "strategy": "magic"}, "strategy"),
    ],
)
def test_refusal_names_the_field(body: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_request(record(msgpack.packb(body)), LIMITS)
    assert caught.value.field == field


def test_body_of_a_megabyte_is_refused_by_its_size() -> None:
    with pytest.raises(InvalidRequestError, match="at most 65536") as caught:
        read_request(record(pack(GenerationRequest(prompt="x" * 1_000_000))), LIMITS)
    assert caught.value.field == "body"


def test_unknown_major_version_is_refused() -> None:
    with pytest.raises(UnsupportedVersionError):
        read_request(record(pack(GenerationRequest(prompt="x")), ce_type="gea.request.v2"), LIMITS)


def headers(**values: str) -> RequestHeaders:
    return parse_request_headers(record(b"", **values).headers)


def test_reply_place_is_the_default_or_an_allowed_one() -> None:
    assert reply_of(headers(), DEFAULT, LIMITS) == DEFAULT
    assert reply_of(headers(reply_partition="1"), DEFAULT, LIMITS) == Reply(topic="gea.tokens", partition=1)
    assert reply_of(headers(reply_topic="gea.tokens.acme"), DEFAULT, LIMITS) == Reply(
        topic="gea.tokens.acme", partition=1
    )


@pytest.mark.parametrize(
    ("values", "field"),
    [({"reply_topic": "gea.requests"}, "reply_topic"), ({"reply_partition": "4"}, "reply_partition")],
)
def test_reply_place_of_somebody_else_is_refused(values: dict[str, str], field: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        reply_of(headers(**values), DEFAULT, LIMITS)
    assert caught.value.field == field


def test_deadline_is_the_clients_within_bounds_else_the_default() -> None:
    assert deadline_of(headers(), LIMITS, now_ms=1_000) == 121_000
    assert deadline_of(headers(deadline_ms="5000"), LIMITS, now_ms=1_000) == 5_000
    with pytest.raises(DeadlineExceededError):
        deadline_of(headers(deadline_ms="1000"), LIMITS, now_ms=1_000)
    with pytest.raises(InvalidRequestError, match="600000"):
        deadline_of(headers(deadline_ms="601001"), LIMITS, now_ms=1_000)


def status(*, requests_in_flight: int = 0, lag: int = 0) -> WorkerStatus:
    return WorkerStatus(
        worker_id="g",
        pool=Pool.GENERATION,
        colour="blue",
        state=WorkerState.READY,
        updated_ms=0,
        requests_in_flight=requests_in_flight,
        lag=lag,
    )


def test_load_above_the_queue_depth_is_rejected_with_a_time_to_come_back() -> None:
    load = load_of([status(requests_in_flight=4, lag=9), status(requests_in_flight=3)])
    assert load == Load(num_workers=2, num_requests=12)
    with pytest.raises(RejectedError) as caught:
        check_load(load, LIMITS)
    assert 2.0 <= caught.value.retry_after_s <= 60.0


def test_requests_wait_where_no_worker_lives_yet() -> None:
    check_load(load_of([]), LIMITS)
    check_load(Load(num_workers=1, num_requests=9), LIMITS)


def test_seed_is_the_clients_else_the_same_at_every_routing() -> None:
    def stamped(request: GenerationRequest) -> int:
        return stamp(
            headers(),
            request,
            origin=Origin(partition=1, offset=2),
            reply=DEFAULT,
            route=RouteStamp(),
            deadline_ms=1,
            now_ms=0,
            traceparent="",
        ).seed

    assert stamped(GenerationRequest(prompt="x", seed=5)) == 5
    assert stamped(GenerationRequest(prompt="x")) == stamped(GenerationRequest(prompt="x"))
    assert seed_of("r-1", Origin(partition=1, offset=2)) != seed_of("r-1", Origin(partition=1, offset=3))
    assert 0 <= seed_of("r-1", Origin(partition=0, offset=0)) < 2**63
