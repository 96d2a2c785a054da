"""How dead letters are shown: rows, a table, and one whole. What strangers wrote does nothing to a terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from rich.table import Table

from ops.terminal import printable, safe_markup
from schemas.codec import unpack_map
from schemas.errors import DecodeError

if TYPE_CHECKING:
    from ops.dlq import Stored
    from schemas.failure import DeadLetter, Redriven

MAX_SHOWN_CHARS = 4_000  # of a body, for eyes; JSON has all of it
MAX_HEX_BYTES = 1_024
UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def row_of(stored: Stored, redriven: Redriven | None) -> dict[str, Any]:
    """Return a letter without its body, for JSON."""
    letter = stored.letter
    return {
        "place": stored.place,
        "code": letter.code,
        "message": letter.message,
        "request_id": letter.request_id,
        "tenant": stored.tenant,
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "failed_ms": letter.failed_ms,
        "worker_id": letter.worker_id,
        "bytes": len(letter.value) if letter.value is not None else None,
        "left_out": letter.is_left_out,
        "redriven_from": stored.redriven_from,
        "redriven_as": (redriven.request_id or redriven.topic) if redriven else "",
        "key": text_of(letter.key),
        "headers": [[name, text_of(value)] for name, value in letter.headers],
    }


def table_of(letters: Sequence[Stored], redriven: Mapping[str, Redriven], now_ms: int) -> Table:
    """Return a table of letters."""
    table = Table()
    for column in ("place", "age", "code", "reason", "request", "origin", "bytes", "redriven as"):
        table.add_column(column, overflow="fold")  # what stands here is given to other commands: nothing is cut off
    for stored in letters:
        letter = stored.letter
        note = redriven.get(stored.place)
        cells = (
            stored.place,
            age(now_ms - letter.failed_ms),
            letter.code,
            letter.message[:200],
            letter.request_id,
            f"{letter.topic} {letter.partition}:{letter.offset}",
            _size(letter),
            (note.request_id or note.topic) if note else "",
        )
        table.add_row(*map(safe_markup, cells))
    return table


def shown(stored: Stored, redriven: Redriven | None, now_ms: int) -> str:
    """Return a whole letter as lines, safe for a terminal."""
    letter = stored.letter
    lines = [
        f"letter    {stored.place}, {age(now_ms - letter.failed_ms)} ago, from worker {letter.worker_id or 'unknown'}",
        f"reason    {letter.code}: {letter.message}",
        f"origin    {letter.topic} {letter.partition}:{letter.offset}, {_size(letter)} bytes",
        f"request   {letter.request_id or 'none'}, tenant {stored.tenant}",
        f"key       {_text(letter.key)}",
        *(f"header    {name}: {_text(value)}" for name, value in letter.headers),
    ]
    if stored.redriven_from:
        lines.append(f"from      a redrive of letter {stored.redriven_from}")
    if redriven is not None:
        lines.append(f"redriven  to {redriven.topic} {redriven.request_id}".rstrip())
    return "\n".join([*map(printable, lines), *_body_lines(letter), ""])


def body_of(letter: DeadLetter) -> dict[str, Any]:
    """Return the body for JSON: `decoded` where it is MessagePack or JSON, else `hex`; both absent without a body."""
    if letter.value is None:
        return {}
    try:
        return {"decoded": _decoded(letter.value)}
    except ValueError:
        return {"hex": letter.value.hex()}


def text_of(value: bytes | None) -> str | None:
    """Return bytes as text where they are UTF-8, else as hex after `0x`."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return f"0x{value.hex()}"


def age(ms: int) -> str:
    """Return how long ago, in one unit."""
    seconds = max(0, ms) // 1000
    size, unit = next((unit for unit in UNITS if seconds >= unit[0]), UNITS[-1])
    return f"{seconds // size} {unit}"


def _text(value: bytes | None) -> str:
    return "none" if value is None else (text_of(value[:MAX_HEX_BYTES]) or "empty")


def _size(letter: DeadLetter) -> str:
    return "left out" if letter.is_left_out else str(len(letter.value or b""))


def _decoded(value: bytes) -> Any:
    """Return plain values that JSON can say. Raises ValueError."""
    try:
        plain = unpack_map(value)
    except DecodeError:
        try:
            plain = msgspec.json.decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError("neither MessagePack nor JSON") from error
    try:
        return json.loads(json.dumps(plain, default=_hex))
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _hex(value: object) -> str:
    if isinstance(value, bytes):
        return f"0x{value.hex()}"
    raise ValueError(f"{type(value).__name__} cannot be shown")


def _body_lines(letter: DeadLetter) -> list[str]:
    if letter.value is None:
        return ["body      none" if not letter.is_left_out else "body      left out, see origin"]
    try:
        text = json.dumps(_decoded(letter.value), ensure_ascii=False, indent=2)
    except ValueError:
        text = letter.value[:MAX_HEX_BYTES].hex(" ", 2)
        rest = len(letter.value) - MAX_HEX_BYTES
        return [f"body      hex {text}" + (f" … and {rest} bytes" if rest > 0 else "")]
    cut = (
        text if len(text) <= MAX_SHOWN_CHARS else f"{text[:MAX_SHOWN_CHARS]}\n… and {len(text) - MAX_SHOWN_CHARS} more"
    )
    return ["body", *(f"  {printable(line)}" for line in cut.split("\n"))]
