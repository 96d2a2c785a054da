"""How records are spoiled. Each way has a weight: what is large comes rarely."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import msgpack

from schemas.envelope import CE_TYPE, CONTENT_TYPE, JSON, NOT_BEFORE_MS, REQUEST_ID, TARGET, TENANT
from streams.topics import (
    CONTROL,
    RETRY_LONG,
    RETRY_SHORT,
    TOKENS,
)
from tests.fuzz_draft import POOL_TOPICS, VIEW_TOPICS, WORK_TOPICS, Draft, Map

MAX_BYTES = 1_000_000  # of a huge value: what a topic still takes


def _null(draft: Draft) -> None:
    draft.value = None


def _empty(draft: Draft) -> None:
    draft.value = b""


def _noise(draft: Draft) -> None:
    draft.value = draft.rng.randbytes(draft.rng.randrange(1, 3_000))


def _truncated(draft: Draft) -> None:
    assert draft.value is not None
    draft.value = draft.value[: draft.rng.randrange(len(draft.value))]


def _extended(draft: Draft) -> None:
    assert draft.value is not None
    draft.value += draft.rng.randbytes(draft.rng.randrange(1, 50))


def _flipped(draft: Draft) -> None:
    assert draft.value is not None
    value = bytearray(draft.value)
    for _ in range(draft.rng.randrange(1, 6)):
        value[draft.rng.randrange(len(value))] ^= 1 << draft.rng.randrange(8)
    draft.value = bytes(value)


WRONG: list[Any] = [
    None, True, -1, 0, 2**63, -(2**63), 1e308, float("nan"), float("-inf"), "", "x", "\x00", "é" * 300, b"\xff", [],
    [[]], {}, {"a": {}}, [1] * 100, "gea.tokens.nobody", "../etc", "🌶" * 2_000, ["x"] * 50, {"blue": 1}, [None],
    -(2**31), 1.5,
]  # fmt: skip
FIXED = {"document_id", "worker_id", "kind", "epoch", "weights", "text", "version"}
"""Fields that a wrong value could turn into an order; they are spoiled by `_untyped` only."""


def _wrong_values(draft: Draft) -> None:
    """One to three fields, at any depth, hold something else."""
    for _ in range(draft.rng.randrange(1, 4)):
        place = _any_map(draft.rng, draft.body)
        fields = [name for name in place if draft.topic in WORK_TOPICS or name not in FIXED]
        if fields and draft.rng.random() < 0.9:
            place[draft.rng.choice(fields)] = deepcopy(draft.rng.choice(WRONG))
        else:
            place[f"unknown_{draft.rng.randrange(10)}"] = deepcopy(draft.rng.choice(WRONG))
    draft.repack()


def _any_map(rng: random.Random, body: Map) -> Map:
    maps = [body]
    for value in body.values():
        maps += [value] if isinstance(value, dict) else []
    return rng.choice(maps)


def _misled(draft: Draft) -> None:
    """A request that wants to go to, or to be answered at, a place that there is not."""
    draft.body["route"] = {"intent": "nowhere", "retrieval": "nowhere", "generation": "nowhere"}
    if draft.rng.random() < 0.5:
        draft.body.pop(draft.rng.choice(["intent", "retrieval"]), None)  # so that it has to go on from here
    place = draft.rng.choice([(TOKENS, 77), (f"{TOKENS}.nobody", 0), ("gea.requests", 0), (TOKENS, -1), (TOKENS, 1)])
    draft.body["reply"] = {"topic": place[0], "partition": place[1], "start": draft.rng.choice([0, 2**62])}
    draft.body["hop"] = draft.rng.choice([0, 1])
    if draft.topic in (RETRY_SHORT, RETRY_LONG):
        draft.headers.append((TARGET, draft.rng.choice([*POOL_TOPICS, "gea.intent.nowhere"]).encode()))
    if draft.topic not in VIEW_TOPICS:
        draft.repack()


def _untyped(draft: Draft) -> None:
    """A body of another shape altogether."""
    body = draft.rng.choice(
        [[], [draft.body], "text", 7, None, {}, {"a": draft.body}, {1: 2}, {b"k": 1}, list(draft.body)]
    )
    draft.value = msgpack.packb(body)


def _missing(draft: Draft) -> None:
    for name in draft.rng.sample(list(draft.body), draft.rng.randrange(1, len(draft.body) + 1)):
        del draft.body[name]
    if draft.topic in VIEW_TOPICS:
        draft.body.clear()
    draft.repack()


def _huge(draft: Draft) -> None:
    size = draft.rng.randrange(300_000, MAX_BYTES)
    name = draft.rng.choice(["prompt", "system", "text", "owner", "unknown", "request_id"])
    filled = {name: "x" * (size - 1_000)}
    draft.value = msgpack.packb(draft.body | ({"request": filled} if "request" in draft.body else filled))


def _many(draft: Draft) -> None:
    """A great many small items: each costs more memory than bytes."""
    item = draft.rng.choice([b"\x80", b"\x90", b"\xc0", b"\xa0"])
    count = draft.rng.randrange(65_000, 70_000)
    draft.value = b"\x81\xa8messages\xdd" + count.to_bytes(4, "big") + item * count


def _deep(draft: Draft) -> None:
    depth = draft.rng.choice([30, 500, 1_023, 5_000, 100_000])
    draft.value = draft.rng.choice([b"\x91", b"\x81\xa1a"]) * depth + b"\xc0"


def _deep_json(draft: Draft) -> None:
    depth = draft.rng.choice([30, 1_000, 100_000])
    opening, closing = draft.rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    body = b'{"prompt": "x", "a": ' + opening * depth + b"1" + closing * depth + b"}"
    _as_json(draft, body[: draft.rng.choice([len(body), len(body) // 2])])


def _json(draft: Draft) -> None:
    """JSON that is none, or that says what JSON cannot mean."""
    body = draft.rng.choice(
        [
            b"", b"{", b"[]", b"null", b"NaN", b"\xff\xfe{\x00", b'{"prompt": NaN}', b'{"prompt": "\\ud800"}',
            b'{"prompt": "x", "seed": ' + b"9" * 5_000 + b"}", b'{"prompt": "x", "temperature": 1e999999}',
            b'{"prompt": "x", "prompt": ""}', b'{"prompt": "\xff"}', json.dumps(draft.body).encode()[:-1],
            b'{"prompt": "x", "max_tokens": 1.0e2}', b"\xef\xbb\xbf{}", b'{"prompt": "\\u0000"}',
        ]
    )  # fmt: skip
    _as_json(draft, body)


def _as_json(draft: Draft, body: bytes) -> None:
    draft.value = body
    draft.headers.append((CONTENT_TYPE, JSON.encode()))


def _bomb(draft: Draft) -> None:
    """A few bytes that announce gigabytes, or hold them compressed."""
    length = draft.rng.choice([2**32 - 1, 2**31, 2**24])
    head = draft.rng.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]) + length.to_bytes(4, "big")
    plain = draft.rng.choice([head, b"\x81\xa6prompt" + head, b"\x91" * 20 + head, head * 200])
    draft.value = draft.rng.choice([plain, gzip.compress(bytes(1_000_000), mtime=0), plain + bytes(5_000)])


def _extension(draft: Draft) -> None:
    draft.value = b"\x81\xa6prompt" + msgpack.packb(msgpack.ExtType(draft.rng.randrange(128), b"x" * 100))


def _bad_id(draft: Draft) -> None:
    bad = draft.rng.choice(
        [b"", b"\xff\xfe", b"a b", b"x" * 129, b"x" * 100_000, b"\x00", b"../..", "é".encode(), b"\n"]
    )
    draft.headers = [(name, value) for name, value in draft.headers if name != REQUEST_ID]
    if draft.rng.random() < 0.8:
        draft.headers.append((REQUEST_ID, bad))
    if draft.topic == CONTROL or (draft.rng.random() < 0.5 and "request_id" in draft.body):
        draft.body["request_id"] = bad.decode(errors="replace")
        draft.repack()


def _bad_header(draft: Draft) -> None:
    names = [
        TENANT, "reply_topic", "reply_partition", "deadline_ms", CONTENT_TYPE, CE_TYPE, "hop", "attempt", "traceparent",
        TARGET, NOT_BEFORE_MS, "redriven_from", "", "é",
    ]  # fmt: skip
    values = [
        b"", b"\xff", b"-1", b"0", b"9" * 30, b"9" * 5_000, "²".encode(), b"gea.requests", b"gea.tokens.nobody",
        b"__consumer_offsets", b"x" * 100_000, b"\x00", b"1e9", b" 1", b"application/json", b"None", "٣".encode(),
    ]  # fmt: skip
    for name in draft.rng.sample(names, draft.rng.randrange(1, 4)):
        draft.headers = [(other, value) for other, value in draft.headers if other != name]
        draft.headers.append((name, draft.rng.choice(values)))
    if draft.topic in VIEW_TOPICS:
        draft.value = b"\xc1"


def _many_headers(draft: Draft) -> None:
    draft.headers += [(f"h{number}", draft.rng.randbytes(20)) for number in range(draft.rng.randrange(100, 2_000))]
    draft.headers += [(TENANT, b"a"), (TENANT, b"\xff")]


def _bad_version(draft: Draft) -> None:
    version = draft.rng.choice(["gea.request.v2", "gea.token.v9", "gea.worker.v1", "", "v1", "x" * 10_000])
    draft.headers.append((CE_TYPE, version.encode() or b"\xff"))


def _bad_key(draft: Draft) -> None:
    draft.key = draft.rng.choice([None, b"", b"\xff\xfe", b"x" * 100_000, b"\x00"])
    draft.value = draft.rng.choice([b"\xc1", b"\x80", None if draft.key else b""])


KINDS: dict[str, tuple[int, Callable[[Draft], None]]] = {
    "null": (4, _null),
    "empty": (2, _empty),
    "noise": (8, _noise),
    "truncated": (8, _truncated),
    "extended": (4, _extended),
    "flipped": (8, _flipped),
    "wrong values": (24, _wrong_values),
    "untyped": (6, _untyped),
    "misled": (5, _misled),
    "missing": (6, _missing),
    "huge": (1, _huge),
    "many": (1, _many),
    "deep": (3, _deep),
    "deep json": (1, _deep_json),
    "json": (5, _json),
    "bomb": (4, _bomb),
    "extension": (2, _extension),
    "bad id": (5, _bad_id),
    "bad header": (8, _bad_header),
    "many headers": (1, _many_headers),
    "bad version": (4, _bad_version),
    "bad key": (4, _bad_key),
}
