"""Forms of answers over a tokenizer of bytes: what is allowed, what ends, what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InvalidRequestError
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE, ByteTokenizer
from workers.generation.engine.constraints import MAX_CACHED, Constraint, ConstraintCompiler
from workers.generation.engine.draw import allowed_tokens
from workers.generation.engine.protocol import ConstraintKind, ConstraintSpec

VOCAB_SIZE = 300  # larger than the tokenizer's
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
OBJECT = ConstraintSpec(kind=ConstraintKind.JSON_OBJECT)


@pytest.fixture(scope="module")
def compiler() -> ConstraintCompiler:
    return ConstraintCompiler(ByteTokenizer(), vocab_size=VOCAB_SIZE)


def schema(value: object) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, value=json.dumps(value))


def regex(value: str) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.REGEX, value=value)


def choice(*values: str) -> ConstraintSpec:
    return ConstraintSpec(kind=ConstraintKind.CHOICE, value=json.dumps(values))


def allowed(constraint: Constraint) -> set[int]:
    return set(torch.nonzero(allowed_tokens(constraint.mask(), VOCAB_SIZE)).flatten().tolist())


def fits(constraint: Constraint, text: str) -> bool:
    """Say whether the text can be written token by token, and may end there."""
    for byte in text.encode():
        is_allowed = byte in allowed(constraint)
        if constraint.accept(byte) is not is_allowed:
            raise AssertionError(f"mask and accept differ at {chr(byte)!r}")
        if not is_allowed:
            return False
    return END_OF_SEQUENCE in allowed(constraint)


@pytest.mark.parametrize(
    ("spec", "good", "bad"),
    [
        (OBJECT, ["{}", '{"a": [1, {"b": null}], "ü🌶": "\\n"}'], ["[]", '"a"', "{", '{"a": 01}', '{"a":  1}']),
        (
            schema(PERSON),
            ['{"name": "Ann", "age": 7}'],
            ['{"name": "Ann"}', '{"age": 7}', '{"name": "Ann", "age": -7}'],
        ),
        (schema({"enum": ["a", 1, None]}), ['"a"', "1", "null"], ["a", "2"]),
        (schema({"$ref": "#/$defs/x", "$defs": {"x": {"const": "y"}}}), ['"y"'], ['"z"']),
        (regex(r"^[a-c]{2}(é|1)?$"), ["ab", "abé", "cc1"], ["a", "abc", "d"]),
        (regex('a/b"\\\\\n'), ['a/b"\\\n'], ["a/b"]),
        (choice("yes", "no", "not yet"), ["yes", "no", "not yet"], ["ye", "not", "maybe"]),
        (choice('with "quotes"\n', "你好 🌶️", "\\d"), ['with "quotes"\n', "你好 🌶️", "\\d"], ["1", "你"]),
    ],
)
def test_text_of_the_form_and_no_other_can_be_written(
    compiler: ConstraintCompiler, spec: ConstraintSpec, good: list[str], bad: list[str]
) -> None:
    written = {text: fits(compiler.compile(spec), text) for text in good + bad}
    assert written == dict.fromkeys(good, True) | dict.fromkeys(bad, False)


def test_padding_ids_and_control_tokens_are_never_allowed(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(regex("(.|\n)*"))
    assert allowed(constraint) - {END_OF_SEQUENCE} <= set(range(256))
    constraint = compiler.compile(regex("(.|\n)+"))
    assert allowed(constraint) <= set(range(256))
    assert constraint.mask().shape == ((VOCAB_SIZE + 31) // 32,)


def test_white_space_is_never_endless(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(OBJECT)
    is_in_string = False
    for byte in b'{"a": {"b": [1, 2], "c": {}}, "d": "xy"}':
        spaces = constraint.fork()
        num_spaces = 0
        while not is_in_string and (found := set(b" \n\t\r") & allowed(spaces)):
            assert spaces.accept(min(found))
            num_spaces += 1
            assert num_spaces < 2
        assert constraint.accept(byte)
        is_in_string ^= byte == ord('"')
    assert constraint.is_finished


def test_finished_is_told_when_only_the_end_may_follow(compiler: ConstraintCompiler) -> None:
    constraint = compiler.compile(choice("a", "ab"))
    assert not constraint.is_finished
    assert constraint.accept(ord("a"))
    assert not constraint.is_finished
    assert allowed(constraint) == {ord("b"), END_OF_SEQUENCE}
    assert constraint.accept(ord("b"))
    assert constraint.is_finished


def test_forks_go_on_apart(compiler: ConstraintCompiler) -> None:
    first = compiler.compile(choice("aa", "ab"))
    assert first.accept(ord("a"))
    second = first.fork()
    assert first.accept(ord("a"))
    assert allowed(second) == {ord("a"), ord("b")}
    assert second.accept(ord("b"))
    assert first.is_finished and second.is_finished


def test_token_that_does_not_fit_is_told_and_no_error(compiler: ConstraintCompiler) -> None:
    assert not compiler.compile(OBJECT).accept(ord("x"))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        (schema({"type": "objectt"}), "objectt"),
        (schema({"if": {}, "then": {}}), "if"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "minimum"),
        (schema({"$ref": "https://example.org/x"}), "example.org"),
        (schema(False), "json_schema"),
        (ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, value="{"), "json_schema"),
        (regex("(a"), "unclosed"),
        (regex("(?=a)b"), "look-ahead"),
        (regex("[a&&b]"), "no text"),
        (regex("a" * 70_000), "bytes"),
    ],
)
def test_form_that_cannot_be_held_is_refused_by_name(
    compiler: ConstraintCompiler, spec: ConstraintSpec, match: str
) -> None:
    with pytest.raises(InvalidRequestError, match=match) as caught:
        compiler.compile(spec)
    assert caught.value.field == "response_format"


def test_form_that_becomes_too_much_work_is_refused_and_never_ends_as_if_whole(compiler: ConstraintCompiler) -> None:
    anything = [{"type": "object", "properties": {f"k{i}": {} for i in range(size)}} for size in range(1, 40)]
    with pytest.raises(InvalidRequestError, match="response_format"):
        constraint = compiler.compile(schema({"anyOf": anything}))
        constraint.accept(ord("{"))
        constraint.mask()


def test_forms_are_compiled_once_and_only_so_many_are_kept(compiler: ConstraintCompiler) -> None:
    made = ConstraintCompiler(ByteTokenizer(), vocab_size=VOCAB_SIZE)
    for number in range(MAX_CACHED + 5):
        made.compile(choice(str(number)))
    assert len(made._compiled) == MAX_CACHED
    assert choice("0") not in made._compiled
    assert made.compile(choice("7")).accept(ord("7"))


def test_threads_may_compile_at_once(compiler: ConstraintCompiler) -> None:
    def write(number: int) -> bool:
        return fits(compiler.compile(choice(f"{number % 3}x")), f"{number % 3}x")

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(write, range(24)))


TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x7f"), max_size=6)  # DEL is written as an escape only
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=30, deadline=None)
@given(st.dictionaries(TEXTS, VALUES, max_size=3))
def test_every_object_can_be_written(value: dict[str, object]) -> None:
    constraint = COMPILE(OBJECT)
    assert all(constraint.accept(byte) for byte in json.dumps(value, ensure_ascii=False).encode())
    assert constraint.is_finished


COMPILE: Callable[[ConstraintSpec], Constraint] = ConstraintCompiler(ByteTokenizer(), vocab_size=VOCAB_SIZE).compile
