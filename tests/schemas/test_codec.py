"""Bytes in, a message or one of our errors out, whatever the bytes are."""

from __future__ import annotations

import contextlib

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.codec import Limits, convert, pack, unpack, unpack_map
from schemas.errors import DecodeError, InvalidRequestError
from schemas.failure import DeadLetter
from schemas.intent import IntentResult
from schemas.request import GenerationRequest, Message, Role, Strategy
from schemas.retrieval import Passage, RetrievalResult
from schemas.tokens import (
    Claim,
    End,
    EndStatus,
    Epoch,
    Explanation,
    Failure,
    FinishReason,
    Kind,
    TokenLogprob,
    TokenRecord,
)

text = st.text(max_size=30)
json_like = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | text | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(text, inner, max_size=4),
    max_leaves=20,
)
TYPES = (GenerationRequest, TokenRecord, IntentResult, RetrievalResult, DeadLetter)


@given(st.binary(max_size=300), st.sampled_from(TYPES))
def test_any_bytes_give_a_message_or_our_error(raw: bytes, type_: type[msgspec.Struct]) -> None:
    with contextlib.suppress(DecodeError, InvalidRequestError):
        assert isinstance(unpack(raw, type_), type_)


@given(json_like, st.sampled_from(TYPES))
def test_any_value_gives_a_message_or_our_error(value: object, type_: type[msgspec.Struct]) -> None:
    with contextlib.suppress(DecodeError, InvalidRequestError):
        assert isinstance(unpack(msgpack.packb(value), type_), type_)


@given(st.dictionaries(st.sampled_from(GenerationRequest.__struct_fields__), json_like, max_size=5))
def test_any_value_of_a_known_field_gives_a_message_or_our_error(value: dict[str, object]) -> None:
    try:
        unpack(msgpack.packb(value), GenerationRequest)
    except InvalidRequestError as error:
        assert error.field is None or error.field.split(".")[0].split("[")[0] in value


@pytest.mark.parametrize(
    "raw",
    [
        None,
        b"",
        b"\xc1",
        b"\x81",
        b"not msgpack",
        msgpack.packb([1]),
        msgpack.packb("text"),
        msgpack.packb({}) + b"\x00",
        msgpack.packb({1: 2}),
        msgpack.packb({"a": msgpack.Timestamp(1)}, use_bin_type=True),
        msgpack.packb({"a": msgpack.ExtType(5, b"")}),
        b"\x81\xa1a\xa1\xff",  # bad UTF-8
        b"\x91" * 100_000,  # deep
        b"\xdd\xff\xff\xff\xff",  # an array of 4 billion
        b"\xdf\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_what_is_no_map_is_refused(raw: bytes | None) -> None:
    with pytest.raises(DecodeError):
        unpack_map(raw)


@pytest.mark.parametrize("value", [{"a": "x" * 20}, {"a": b"x" * 20}, {"a": [0] * 6}, {str(n): 0 for n in range(6)}])
def test_sizes_above_the_limits_are_refused(value: object) -> None:
    raw = msgpack.packb(value)
    assert unpack_map(raw) == value
    with pytest.raises(DecodeError):
        unpack_map(raw, Limits(message_bytes=1_000, string_bytes=10, items=5))
    with pytest.raises(DecodeError, match="at most 5"):
        unpack_map(raw, Limits(message_bytes=5))


def test_unknown_fields_are_ignored_and_a_wrong_type_is_named() -> None:
    assert unpack(msgpack.packb({"prompt": "x", "new_field": 1}), GenerationRequest) == GenerationRequest(prompt="x")
    with pytest.raises(InvalidRequestError, match="max_tokens") as caught:
        unpack(msgpack.packb({"prompt": "x", "max_tokens": "many"}), GenerationRequest)
    assert caught.value.field == "max_tokens"
    with pytest.raises(InvalidRequestError) as caught:
        convert({"messages": [{"role": "robot", "content": "x"}]}, GenerationRequest)
    assert (caught.value.field or "").startswith("messages")


def test_defaults_are_left_out_on_the_wire() -> None:
    assert msgpack.unpackb(pack(GenerationRequest(prompt="x"))) == {"prompt": "x"}
    record = TokenRecord(kind=Kind.DELTA, epoch=Epoch(0, 1), owner="a", text="x", token_ids=(1,))
    assert msgpack.unpackb(pack(record)) == {
        "kind": "delta",
        "epoch": [0, 1],
        "owner": "a",
        "text": "x",
        "token_ids": [1],
    }


@pytest.mark.parametrize("message", [GenerationRequest(prompt="\ud83d"), GenerationRequest(prompt="x", seed=2**70)])
def test_what_cannot_be_packed_is_refused(message: GenerationRequest) -> None:
    with pytest.raises(InvalidRequestError):
        pack(message)


passages = st.builds(Passage, text=text, passage_id=text, score=st.floats(0, 1), semantic_rank=st.integers(0, 99))
intents = st.builds(
    IntentResult, intent=text, confidence=st.floats(0, 1), alternatives=st.dictionaries(text, st.floats(0, 1))
)
ends = st.builds(
    End,
    status=st.sampled_from(EndStatus),
    finish_reason=st.sampled_from(FinishReason),
    failure=st.none() | st.builds(Failure, code=text, message=text, field=st.none() | text),
    explanation=st.none() | st.builds(Explanation, intent=st.none() | intents, prompt=text),
)
tokens = st.builds(
    TokenRecord,
    kind=st.sampled_from(Kind),
    epoch=st.builds(Epoch, st.integers(0, 2**31), st.integers(0, 2**31)),
    owner=text,
    seq=st.integers(0, 2**31),
    text=text,
    token_ids=st.lists(st.integers(0, 2**31), max_size=5).map(tuple),
    logprobs=st.none()
    | st.lists(st.builds(TokenLogprob, token_id=st.integers(0, 9), logprob=st.floats(-99, 0)), max_size=3).map(tuple),
    claim=st.none() | st.builds(Claim, model=text),
    end=st.none() | ends,
)
requests = st.builds(
    GenerationRequest,
    prompt=st.none() | text,
    messages=st.none() | st.lists(st.builds(Message, role=st.sampled_from(Role), content=text), max_size=3).map(tuple),
    temperature=st.none() | st.floats(0, 2),
    logit_bias=st.none() | st.dictionaries(text, st.floats(-100, 100), max_size=3),
    strategy=st.none() | st.sampled_from(Strategy),
    passages=st.none() | st.lists(passages, max_size=2).map(tuple),
)
letters = st.builds(
    DeadLetter,
    code=text,
    message=text,
    topic=text,
    partition=st.integers(0, 99),
    offset=st.integers(0, 2**60),
    value=st.none() | st.binary(max_size=50),
    headers=st.lists(st.tuples(text, st.binary(max_size=9)), max_size=3).map(tuple),
)


@given(
    tokens
    | requests
    | intents
    | letters
    | st.builds(RetrievalResult, passages=st.lists(passages, max_size=3).map(tuple))
)
def test_a_message_survives_the_way_over_the_wire(message: msgspec.Struct) -> None:
    assert unpack(pack(message), type(message)) == message
