"""The form of an answer on the wire: what is taken, what is refused by name, and that nothing of it is lost."""

from __future__ import annotations

import json
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import convert, pack, unpack, unpack_json_map
from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.errors import InvalidRequestError
from schemas.request import GenerationRequest, validate
from schemas.response_format import (
    MAX_CHOICE_CHARS,
    MAX_CHOICES,
    MAX_NAME_CHARS,
    MAX_PATTERN_CHARS,
    MAX_SCHEMA_BYTES,
    MAX_SCHEMA_DEPTH,
    JsonSchemaFormat,
)

ORDERED = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": [1, None, "ü🌶"]}}, "required": ["b"]}
FORMS: list[dict[str, Any]] = [
    {"type": "text"},
    {"type": "json_object"},
    {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": ORDERED}},
    {"type": "json_schema", "json_schema": {"schema": {}, "description": "fields that are not known are left out"}},
    {"type": "regex", "pattern": "[a-z]+"},
    {"type": "choice", "choices": ["yes", "no"]},
]


def body(form: Any) -> dict[str, Any]:
    return {"prompt": "hello", "response_format": form}


def refused(form: Any) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        validate(convert(body(form), GenerationRequest))
    return caught.value


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_the_same_from_messagepack_and_json_and_after_every_hop(form: dict[str, Any]) -> None:
    packed = unpack(msgpack.packb(body(form)), GenerationRequest)
    from_json = convert(unpack_json_map(json.dumps(body(form)).encode()), GenerationRequest)
    assert packed == from_json
    validate(packed)
    origin = Origin(partition=0, offset=0)
    reply = Reply(topic="gea.tokens", partition=0)
    routed = RoutedRequest(
        request_id="r", request=packed, reply=reply, origin=origin, seed=1, received_ms=0, deadline_ms=1
    )
    again = unpack(pack(unpack(pack(routed), RoutedRequest)), RoutedRequest)
    assert again.request == packed
    assert again.request.has_form is (form["type"] != "text")


def test_properties_keep_their_order() -> None:
    (form,) = (unpack(pack(convert(body(f), GenerationRequest)), GenerationRequest).response_format for f in FORMS[2:3])
    assert isinstance(form, JsonSchemaFormat)
    assert form.json_schema.text() == json.dumps(ORDERED, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(
    ("form", "field", "match"),
    [
        ({"type": "xml"}, "response_format.type", "xml"),
        ({}, "response_format", "type"),
        ("json", "response_format", "object"),
        ({"type": "json_schema"}, "response_format", "json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": True}}, "response_format.json_schema.schema", "object"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "response_format.json_schema.schema", "object"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": b"x"}}}, "response_format", "not JSON"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": float("nan")}}}, "response_format", "not JSON"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "\ud800"}}}, "response_format", "not JSON"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "name": "x" * (MAX_NAME_CHARS + 1)}}, None, "64"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "x" * MAX_SCHEMA_BYTES}}}, None, "32768"),
        ({"type": "regex", "pattern": ""}, "response_format", "1 to 2048"),
        ({"type": "regex", "pattern": "x" * (MAX_PATTERN_CHARS + 1)}, "response_format", "1 to 2048"),
        ({"type": "regex", "pattern": "\udfff"}, "response_format", "text"),
        ({"type": "regex"}, "response_format", "pattern"),
        ({"type": "choice", "choices": []}, "response_format", "1 to 256"),
        ({"type": "choice", "choices": ["x"] * (MAX_CHOICES + 1)}, "response_format", "1 to 256"),
        ({"type": "choice", "choices": ["", "a"]}, "response_format", "1 to 1024"),
        ({"type": "choice", "choices": ["x" * (MAX_CHOICE_CHARS + 1)]}, "response_format", "1 to 1024"),
        ({"type": "choice", "choices": ["x" * MAX_CHOICE_CHARS] * 33}, "response_format", "32768"),
        ({"type": "choice", "choices": "yes"}, "response_format.choices", "array"),
    ],
)
def test_what_is_out_of_range_is_refused_with_field_and_range(form: Any, field: str | None, match: str) -> None:
    error = refused(form)
    assert error.field == (field or "response_format")
    assert match in error.message


def test_depth_is_bounded_and_found_without_recursion() -> None:
    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        for level in range(depth - 1):
            schema = {"items": [schema]} if level % 2 else {"not": schema}
        return {"type": "json_schema", "json_schema": {"schema": schema}}

    validate(convert(body(nested(20)), GenerationRequest))
    assert f"at most {MAX_SCHEMA_DEPTH} levels" in refused(nested(MAX_SCHEMA_DEPTH + 1)).message
    assert f"at most {MAX_SCHEMA_DEPTH} levels" in refused(nested(500)).message


def test_a_prepared_text_cannot_be_asked_for_in_a_form() -> None:
    asked = body({"type": "json_object"}) | {"strategy": "template"}
    with pytest.raises(InvalidRequestError, match="response_format"):
        validate(convert(asked, GenerationRequest))
    validate(convert(asked | {"response_format": {"type": "text"}}, GenerationRequest))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(JSON)
def test_whatever_stands_for_a_form_is_taken_or_refused_by_name(value: Any) -> None:
    for form in (
        value,
        {"type": "json_schema", "json_schema": {"schema": value}},
        {"type": "choice", "choices": value},
    ):
        try:
            request = convert(body(form), GenerationRequest)
            validate(request)
        except InvalidRequestError as error:
            assert (error.field or "").startswith("response_format")
        else:
            assert unpack(pack(request), GenerationRequest) == request
            assert msgspec.to_builtins(request).get("response_format") is not None or form is None
