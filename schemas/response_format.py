"""The form that an answer must have: any text, JSON, a regular expression, one of several strings.

The names are those of the OpenAI API, with `regex` and `choice` beside them. Knows sizes, not whether a schema or a
pattern makes sense: that shows when it is compiled, where the model is.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from schemas.errors import InvalidRequestError

MAX_SCHEMA_BYTES = 32_768
MAX_SCHEMA_DEPTH = 32
MAX_NAME_CHARS = 64  # of a schema, as in the OpenAI API
MAX_PATTERN_CHARS = 2_048
MAX_CHOICES = 256
MAX_CHOICE_CHARS = 1_024


class TextFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Any text: as without a form."""


class JsonObjectFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A JSON schema. It always holds in full, whatever `strict` says; `name` is for people."""

    schema: dict[str, Any]
    name: str = ""
    strict: bool | None = None

    def text(self) -> str:
        """Return the schema as JSON text, its properties in their order. Raises InvalidRequestError if it is none."""
        try:
            text = json.dumps(self.schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            text.encode()
        except (TypeError, ValueError, RecursionError) as error:  # bytes, NaN, a lone surrogate; the depth
            raise _refuse(f"json_schema.schema: not JSON: {error}") from error
        return text


class JsonSchemaFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """JSON that fits a schema."""

    json_schema: JsonSchema


class RegexFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="regex"):
    """Text that a regular expression matches as a whole; the syntax is that of Rust, without look-around."""

    pattern: str


class ChoiceFormat(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="choice"):
    """One of several strings."""

    choices: tuple[str, ...]


ResponseFormat = TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat


def check_response_format(form: ResponseFormat) -> None:
    """Check the sizes of a form. Raises InvalidRequestError."""
    match form:
        case JsonSchemaFormat(json_schema=schema):
            _check_schema(schema)
        case RegexFormat(pattern=pattern):
            if not 1 <= len(pattern) <= MAX_PATTERN_CHARS or not _is_text(pattern):
                raise _refuse(f"pattern: 1 to {MAX_PATTERN_CHARS} characters of text are allowed")
        case ChoiceFormat(choices=choices):
            if not 1 <= len(choices) <= MAX_CHOICES:
                raise _refuse(f"choices: 1 to {MAX_CHOICES} are allowed")
            if not all(1 <= len(choice) <= MAX_CHOICE_CHARS and _is_text(choice) for choice in choices):
                raise _refuse(f"choices: each has 1 to {MAX_CHOICE_CHARS} characters of text")
            if sum(len(choice.encode()) for choice in choices) > MAX_SCHEMA_BYTES:
                raise _refuse(f"choices: at most {MAX_SCHEMA_BYTES} bytes are allowed in all")


def _check_schema(schema: JsonSchema) -> None:
    if len(schema.name) > MAX_NAME_CHARS:
        raise _refuse(f"json_schema.name: at most {MAX_NAME_CHARS} characters are allowed")
    level, depth = [schema.schema], 0
    while level:
        depth += 1
        if depth > MAX_SCHEMA_DEPTH:
            raise _refuse(f"json_schema.schema: at most {MAX_SCHEMA_DEPTH} levels are allowed")
        level = [inner for outer in level for inner in _children(outer)]
    num_bytes = len(schema.text().encode())
    if num_bytes > MAX_SCHEMA_BYTES:
        raise _refuse(f"json_schema.schema: {num_bytes} bytes of JSON: at most {MAX_SCHEMA_BYTES} are allowed")


def _children(value: Any) -> list[Any]:
    inner = value.values() if isinstance(value, dict) else value
    return [each for each in inner if isinstance(each, dict | list | tuple)]


def _is_text(value: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in value)


def _refuse(message: str) -> InvalidRequestError:
    return InvalidRequestError(f"response_format: {message}", field="response_format")
