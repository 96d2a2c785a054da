"""Bytes to messages and back: MessagePack on the wire, msgspec types in the program.

Knows sizes and types, not topics. The invariant: `unpack` either returns a value of the asked type or raises one of
our errors, in memory bounded by `Limits`, whatever the bytes are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgpack
import msgspec

from schemas.errors import DecodeError, InvalidRequestError

T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Upper bounds for one message. Kafka's own default for a record is 1 MiB."""

    message_bytes: int = 1_048_576
    string_bytes: int = 1_048_576
    items: int = 65_536


DEFAULT_LIMITS = Limits()


def pack(message: msgspec.Struct) -> bytes:
    """Pack a message into a MessagePack map with the names of its fields; defaults are left out.

    Raises InvalidRequestError for text with a lone surrogate and for whole numbers of more than 64 bits.
    """
    try:
        packed = msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)), use_bin_type=True)
    except (UnicodeEncodeError, OverflowError) as error:
        raise InvalidRequestError(f"{type(message).__name__} cannot be packed: {error}") from error
    assert isinstance(packed, bytes)
    return packed


def unpack_map(raw: bytes | None, limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """Unpack bytes into a plain map.

    Raises DecodeError if they are no single MessagePack map within `limits`.
    """
    if raw is None:
        raise DecodeError("the record has no value")
    if len(raw) > limits.message_bytes:
        raise DecodeError(f"message of {len(raw)} bytes: at most {limits.message_bytes} are allowed")
    try:
        value = msgpack.unpackb(
            raw,
            raw=False,
            strict_map_key=True,
            max_str_len=limits.string_bytes,
            max_bin_len=limits.string_bytes,
            max_array_len=limits.items,
            max_map_len=limits.items,
            max_ext_len=0,
            ext_hook=_refuse_extension,
        )
    except (ValueError, msgpack.UnpackException) as error:
        # ValueError covers bad UTF-8, extra bytes, sizes and nesting; UnpackException covers truncation.
        raise DecodeError(f"not MessagePack: {error}") from error
    if not isinstance(value, dict):
        raise DecodeError(f"expected a map, got {type(value).__name__}")
    return value


def unpack_json_map(raw: bytes | None, limits: Limits = DEFAULT_LIMITS) -> dict[str, Any]:
    """Return the plain map of a JSON object.

    Raises DecodeError for anything else, or more bytes than `limits` allow.
    """
    if len(raw or b"") > limits.message_bytes:
        raise DecodeError(f"message of {len(raw or b'')} bytes: at most {limits.message_bytes} are allowed")
    try:
        value = msgspec.json.decode(raw or b"")
    except (msgspec.DecodeError, RecursionError) as error:
        raise DecodeError(f"not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DecodeError(f"expected a map, got {type(value).__name__}")
    return value


def _refuse_extension(code: int, _: bytes) -> None:
    raise ValueError(f"extension type {code} is not allowed")


def convert(value: Mapping[str, Any], type_: type[T]) -> T:
    """Convert a plain map into a message; unknown fields are ignored.

    Raises InvalidRequestError that names the field.
    """
    try:
        return msgspec.convert(value, type_)
    except (msgspec.ValidationError, RecursionError) as error:
        message, _, path = str(error).partition(" - at `")  # "… - at `$.stop[0]`", "… - at `key` in `$.logit_bias`"
        field = path.rpartition("$.")[2].rstrip("`") or None
        raise InvalidRequestError(f"{field}: {message}" if field else message, field=field) from error


def unpack(raw: bytes | None, type_: type[T], limits: Limits = DEFAULT_LIMITS) -> T:
    """Unpack bytes into a message of `type_`.

    Raises DecodeError for bytes that are no map, InvalidRequestError for a map of another shape.
    """
    return convert(unpack_map(raw, limits), type_)
