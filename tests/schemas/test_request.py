"""Every field of a request against its range."""

from __future__ import annotations

import math

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.errors import InvalidRequestError
from schemas.request import (
    LOGIT_BIAS_RANGE,
    MAX_LOGIT_BIAS,
    MAX_MESSAGES,
    MAX_PASSAGES,
    MAX_PROMPT_BYTES,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKENS,
    RANGES,
    GenerationRequest,
    Message,
    Role,
    check_id,
    validate,
)
from schemas.retrieval import Passage

WHOLE = ("max_tokens", "top_k", "seed", "logprobs", "n", "num_passages")


def ask(**fields: object) -> GenerationRequest:
    return msgspec.structs.replace(GenerationRequest(prompt="hello"), **fields)


def refused(request: GenerationRequest) -> InvalidRequestError:
    with pytest.raises(InvalidRequestError) as caught:
        validate(request)
    return caught.value


def user(content: str) -> Message:
    return Message(role=Role.USER, content=content)


@pytest.mark.parametrize("field", RANGES)
@given(chance=st.floats(0, 1))
def test_values_inside_the_range_pass(field: str, chance: float) -> None:
    allowed = RANGES[field]
    value = allowed.low + chance * (allowed.high - allowed.low)
    value = min(int(value), int(allowed.high)) if field in WHOLE else value
    if value in allowed:
        validate(ask(**{field: value}))


@pytest.mark.parametrize("field", RANGES)
def test_bounds_are_exact_and_the_refusal_names_field_and_range(field: str) -> None:
    allowed = RANGES[field]
    step = 1 if field in WHOLE else 1e-6
    high = int(allowed.high) if field in WHOLE else allowed.high
    validate(ask(**{field: high}))
    if not allowed.above:
        validate(ask(**{field: type(high)(allowed.low)}))
    for value in (allowed.low if allowed.above else allowed.low - step, high + step, -(10**9), 10**20, 10**400):
        error = refused(ask(**{field: value}))
        assert error.field == field
        assert str(allowed) in error.message


@pytest.mark.parametrize("field", [field for field in RANGES if field not in WHOLE])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_none_are_refused(field: str, value: float) -> None:
    assert refused(ask(**{field: value})).field == field


@pytest.mark.parametrize("field", RANGES)
def test_what_only_equals_a_number_is_refused_where_it_is_asked(field: str) -> None:
    for value in (True, "1", *((1.0, 1.5) if field in WHOLE else ())):
        error = refused(ask(**{field: value}))
        assert error.field == field
        assert repr(value) in error.message


@pytest.mark.parametrize("field", ["temperature", "top_p"])
@pytest.mark.parametrize("value", [0.0, 1e-6, 1e-4, 1.0])
def test_tiny_temperatures_and_top_p_are_allowed(field: str, value: float) -> None:
    validate(ask(**{field: value}))


def test_the_deployment_lowers_max_tokens() -> None:
    validate(ask(max_tokens=512), max_tokens=512)
    with pytest.raises(InvalidRequestError, match="1 to 512"):
        validate(ask(max_tokens=513), max_tokens=512)


@pytest.mark.parametrize("prompt", ["", " ", "\n\t\u3000"])
def test_an_empty_prompt_is_refused(prompt: str) -> None:
    assert refused(GenerationRequest(prompt=prompt)).field == "prompt"


def test_exactly_one_of_prompt_and_messages() -> None:
    assert refused(GenerationRequest()).field == "prompt"
    assert refused(GenerationRequest(prompt="x", messages=(user("x"),))).field == "prompt"
    validate(GenerationRequest(messages=(user("x"),)))


def test_a_conversation_ends_with_the_user() -> None:
    assistant = Message(role=Role.ASSISTANT, content="x")
    for messages in ((), (user("x"), assistant), (user(" "),), (user("x"),) * (MAX_MESSAGES + 1)):
        assert refused(GenerationRequest(messages=messages)).field == "messages"
    validate(GenerationRequest(messages=(user("x"),) * MAX_MESSAGES))


def test_text_is_counted_in_bytes() -> None:
    validate(GenerationRequest(prompt="你" * (MAX_PROMPT_BYTES // 3)))
    assert refused(GenerationRequest(prompt="你" * (MAX_PROMPT_BYTES // 3 + 1))).field == "prompt"
    assert refused(GenerationRequest(prompt="x", system="x" * MAX_PROMPT_BYTES)).field == "prompt"
    assert refused(GenerationRequest(prompt="x" * 1_048_576)).field == "prompt"


def test_a_lone_surrogate_is_no_text() -> None:
    assert refused(GenerationRequest(prompt="a\ud83d")).field == "prompt"
    refused(GenerationRequest(messages=(user("a\udc00"),)))
    refused(ask(system="\ud83d"))


def test_stop_strings_and_tokens() -> None:
    validate(ask(stop=("x" * MAX_STOP_CHARS,) * MAX_STOP_STRINGS, stop_token_ids=(0, 2**31 - 1)))
    for stop in (("",), ("x" * (MAX_STOP_CHARS + 1),), ("x",) * (MAX_STOP_STRINGS + 1), "ab", (5,), (None,)):
        assert refused(ask(stop=stop)).field == "stop"
    for token_ids in ((-1,), (2**31,), (5.0,), (True,), (None,), (1,) * (MAX_STOP_TOKENS + 1)):
        assert refused(ask(stop_token_ids=token_ids)).field == "stop_token_ids"


def test_logit_bias_keys_and_values() -> None:
    validate(ask(logit_bias={"0": -100.0, str(2**31 - 1): 100.0}))
    low, high = LOGIT_BIAS_RANGE.low, LOGIT_BIAS_RANGE.high
    for key in ("", "-1", "a", "1.0", "²", str(2**31), " 1", "9" * 5_000, 5, 5.0):
        assert refused(ask(logit_bias={key: 0.0})).field == "logit_bias"
    for value in (low - 1, high + 1, math.nan, math.inf, True, "1"):
        assert refused(ask(logit_bias={"1": value})).field == "logit_bias"
    assert refused(ask(logit_bias={str(n): 0.0 for n in range(MAX_LOGIT_BIAS + 1)})).field == "logit_bias"


def test_passages_are_limited() -> None:
    validate(ask(passages=(Passage(text="x"),) * MAX_PASSAGES))
    assert refused(ask(passages=(Passage(text="x"),) * (MAX_PASSAGES + 1))).field == "passages"


@pytest.mark.parametrize("field", ["session_id", "intent", "language"])
@pytest.mark.parametrize("value", ["", " ", "a b", "-a", "a/b", "ü", "x" * 129, "a\n", "a\x00"])
def test_malformed_ids_are_refused(field: str, value: str) -> None:
    assert refused(ask(**{field: value})).field == field


@given(st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}", fullmatch=True))
def test_well_formed_ids_pass(value: str) -> None:
    check_id("session_id", value)
