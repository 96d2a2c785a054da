"""Headers of a public request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.envelope import JSON, MSGPACK, RequestHeaders, check_type, header, parse_request_headers
from schemas.errors import GeaError, InvalidRequestError, UnsupportedVersionError


def test_only_the_request_id_is_needed() -> None:
    assert parse_request_headers((("request_id", b"r1"),)) == RequestHeaders(request_id="r1")


def test_all_headers_are_read_and_the_last_of_a_name_counts() -> None:
    headers = parse_request_headers(
        (
            ("request_id", b"r0"),
            ("request_id", b"r1"),
            ("tenant", b"shop"),
            ("reply_topic", b"gea.tokens.shop"),
            ("reply_partition", b"7"),
            ("deadline_ms", b"1700000000000"),
            ("traceparent", b"00-x"),
            ("content-type", JSON.encode()),
            ("ce_type", b"gea.request.v1"),
            ("other", b"\xff"),
        )
    )
    assert headers == RequestHeaders(
        request_id="r1",
        tenant="shop",
        reply_topic="gea.tokens.shop",
        reply_partition=7,
        deadline_ms=1_700_000_000_000,
        traceparent="00-x",
        content_type=JSON,
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("request_id", b""),
        ("request_id", b"a b"),
        ("request_id", b"\xff"),
        ("tenant", b"a/b"),
        ("reply_partition", b"-1"),
        ("reply_partition", b"2147483648"),
        ("reply_partition", "²".encode()),
        ("reply_partition", b"1e3"),
        ("deadline_ms", b""),
        ("deadline_ms", b"9" * 30),
        ("deadline_ms", b"soon"),
        ("content-type", b"text/plain"),
    ],
)
def test_a_malformed_header_is_refused_by_name(name: str, value: bytes) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request_headers((("request_id", b"r1"), (name, value)))
    assert caught.value.field == name


def test_a_missing_request_id_is_named() -> None:
    with pytest.raises(InvalidRequestError) as caught:
        parse_request_headers(())
    assert caught.value.field == "request_id"


def test_another_type_or_version_is_refused() -> None:
    check_type((), "gea.request.v1")
    for other in (b"gea.request.v2", b"gea.token.v1"):
        with pytest.raises(UnsupportedVersionError):
            parse_request_headers((("request_id", b"r1"), ("ce_type", other)))


names = st.sampled_from(["request_id", "tenant", "reply_partition", "deadline_ms", "content-type", "ce_type"])


@given(st.lists(st.tuples(names, st.binary(max_size=12)), max_size=6).map(tuple))
def test_any_headers_give_a_value_or_our_error(headers: tuple[tuple[str, bytes], ...]) -> None:
    try:
        parsed = parse_request_headers(headers)
    except GeaError:
        return
    assert parsed.content_type in (MSGPACK, JSON)
    assert header(headers, "request_id") == parsed.request_id
