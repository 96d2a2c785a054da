"""Letters on a terminal: whole, decoded where they can be, and harmless."""

from __future__ import annotations

import json

import msgpack
import pytest
from rich.console import Console

from ops.dlq import Stored
from ops.letter_view import MAX_SHOWN_CHARS, age, body_of, row_of, shown, table_of, text_of
from ops.terminal import printable
from schemas.failure import DeadLetter, Redriven

EVIL = "\x1b[2J\x9b1m\u202e[red]\r\n\ud800"
NOTE = Redriven(offset=15, topic="gea.requests", redriven_ms=1, request_id="r-1:redrive-2-15")


def stored(**fields: object) -> Stored:
    values: dict[str, object] = {
        "code": "undecodable", "message": "not MessagePack", "topic": "gea.requests", "partition": 1, "offset": 9,
        "value": msgpack.packb({"prompt": "鞋子", "raw": b"\xff"}), "key": b"k\xff", "request_id": "r-1",
        "headers": (("tenant", b"acme"), ("bad", b"\xff")), "worker_id": "w-1", "failed_ms": 1_000,
    }  # fmt: skip
    return Stored(partition=2, offset=15, size=9, letter=DeadLetter(**(values | fields)))  # type: ignore[arg-type]


def is_harmless(text: str) -> bool:
    return all(char.isprintable() or char == "\n" for char in text)


def test_a_letter_is_shown_with_reason_origin_headers_and_decoded_body() -> None:
    text = shown(stored(), NOTE, now_ms=91_000)
    for words in ("2:15, 1 m ago", "w-1", "undecodable: not MessagePack", "gea.requests 1:9", "tenant acme", "鞋子"):
        assert words in text
    assert "bad: 0xff" in text
    assert "0x6bff" in text
    assert "r-1:redrive-2-15" in text


@pytest.mark.parametrize(
    "fields",
    [
        {"message": EVIL.encode("utf-8", "replace").decode()},
        {"request_id": "\x1b]0;x\x07"},
        {"headers": (("\x1b[1m", b"\x1b[2J"), ("\u202e", b"x"))},
        {"key": b"\x1b[2J"},
        {"topic": "[bold]\x1b"},
        {"value": msgpack.packb({"\x1b[2J": "\u202e\x9b\x07"})},
        {"value": json.dumps({"prompt": EVIL}).encode()},
        {"value": b"\x1b[2J\xc1"},
        {"worker_id": "\n\x1b"},
    ],
)
def test_what_strangers_wrote_does_nothing_to_a_terminal(fields: dict[str, object]) -> None:
    assert is_harmless(shown(stored(**fields), None, now_ms=1))
    console = Console(width=300, color_system=None, record=True)
    console.print(table_of([stored(**fields)], {}, 1))
    assert is_harmless(console.export_text())
    json.dumps(row_of(stored(**fields), None)).encode("ascii")


def test_a_narrow_table_cuts_nothing_off_that_other_commands_are_given() -> None:
    letter = stored(code="deadline_exceeded", request_id="0123456789" * 3)
    console = Console(width=80, color_system=None, record=True)
    console.print(table_of([letter], {"2:15": NOTE}, 1))
    rows = [line.split("│") for line in console.export_text().splitlines() if line.startswith("│")]
    columns = ["".join(row[number].strip() for row in rows) for number in (3, 5, 6, 8)]
    assert columns == ["deadline_exceeded", "0123456789" * 3, "gea.requests 1:9", NOTE.request_id]


@pytest.mark.parametrize(
    ("value", "body"),
    [
        (msgpack.packb({"a": b"\xff", "b": [1, None]}), {"decoded": {"a": "0xff", "b": [1, None]}}),
        (b'{"a": "\\ud800"}', None),
        (b'{"a": 1.5}', {"decoded": {"a": 1.5}}),
        (b"\xc1", {"hex": "c1"}),
        (b"", {"hex": ""}),
        (None, {}),
        (b"[" * 100_000, None),
        (b'{"a": ' * 5_000 + b"1" + b"}" * 5_000, None),
        (b"\x81\xa1a" * 400 + b"\x01", None),
    ],
)
def test_a_body_is_decoded_where_it_can_be_and_hex_elsewhere(
    value: bytes | None, body: dict[str, object] | None
) -> None:
    got = body_of(stored(value=value).letter)
    assert got == body if body is not None else len(got) == 1
    json.dumps(got).encode("ascii")
    assert is_harmless(shown(stored(value=value), None, now_ms=1))


def test_a_long_body_is_cut_for_eyes_and_whole_in_json() -> None:
    letter = stored(value=msgpack.packb({"prompt": "x" * 100_000}))
    assert len(shown(letter, None, now_ms=1)) < MAX_SHOWN_CHARS + 1_000
    assert "more" in shown(letter, None, now_ms=1)
    assert body_of(letter.letter)["decoded"]["prompt"] == "x" * 100_000
    assert len(shown(stored(value=bytes(100_000)), None, now_ms=1)) < 5_000


def test_what_is_left_out_says_so() -> None:
    text = shown(stored(value=None, is_left_out=True), None, now_ms=1)
    assert "left out" in text
    assert row_of(stored(value=None, is_left_out=True), None)["bytes"] is None
    assert row_of(stored(), NOTE)["redriven_as"] == "r-1:redrive-2-15"


@pytest.mark.parametrize(
    ("ms", "text"), [(0, "0 s"), (-5, "0 s"), (59_999, "59 s"), (60_000, "1 m"), (7_200_000, "2 h"), (10**9, "11 d")]
)
def test_ages_are_told_in_one_unit(ms: int, text: str) -> None:
    assert age(ms) == text


def test_printable_keeps_what_people_write() -> None:
    assert printable("Schön 你好 🌶") == "Schön 你好 🌶"
    assert printable("a\tb\x1b\ud800") == "a\\tb\\x1b\\ud800"
    assert text_of(None) is None
