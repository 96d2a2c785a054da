"""Records made to do harm, for every topic that a worker reads. The same seed gives the same records.

Each is a good record of its topic, spoiled in one way (or bytes that never were one); whoever reads the topic must put
it aside, refuse or ignore it. What could pass for a valid order of an operator (a route table that moves traffic, a
cancel of a good request) is not made here: that is no fuzz, but power.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack

from schemas.envelope import CE_TYPE, CONTENT_TYPE, JSON, NOT_BEFORE_MS, REQUEST_ID, TARGET, TENANT, Headers
from streams.topics import (
    CONTROL,
    DOCUMENTS,
    REQUESTS,
    RETRY_LONG,
    RETRY_SHORT,
    ROUTES,
    TOKENS,
    WORKERS,
)

POOL_TOPICS = ("gea.intent.blue", "gea.retrieval.blue", "gea.generation.blue")
WORK_TOPICS = (REQUESTS, *POOL_TOPICS, RETRY_SHORT, RETRY_LONG)
"""Topics whose records are each answered for: by an end of the request, or by a dead letter."""
VIEW_TOPICS = (CONTROL, ROUTES, WORKERS, DOCUMENTS, TOKENS)
"""Topics that are read along: what is no record of theirs is ignored."""
ALL_TOPICS = (*WORK_TOPICS, *VIEW_TOPICS)

MAX_BYTES = 1_000_000  # of a huge value: what a topic still takes
Map: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class FuzzRecord:
    """One record. `kind` says how it was spoiled; `request_id` is what its header names, if that is an id."""

    topic: str
    kind: str
    value: bytes | None
    key: bytes | None
    headers: Headers
    request_id: str | None


def fuzz(
    seed: int, count: int, *, topics: tuple[str, ...] = ALL_TOPICS, victim: str = "victim"
) -> Iterator[FuzzRecord]:
    """Yield `count` records, the topics in turn. Those of the token topic carry the id `victim` as their key."""
    for number in range(count):
        rng = random.Random(f"{seed}/{number}")
        yield _record(rng, topics[number % len(topics)], f"fuzz-{seed}-{number}", victim)


def _record(rng: random.Random, topic: str, request_id: str, victim: str) -> FuzzRecord:
    kind = rng.choices(list(KINDS), weights=[weight for weight, _ in KINDS.values()])[0]
    draft = _Draft(rng, topic, request_id, victim)
    KINDS[kind][1](draft)
    named = [value for name, value in draft.headers if name == REQUEST_ID]
    return FuzzRecord(
        topic=topic,
        kind=kind,
        value=draft.value,
        key=draft.key if draft.value is not None or draft.key is not None else b"k",  # Kafka wants one of the two
        headers=tuple(draft.headers),
        request_id=request_id if named and named[-1] == request_id.encode() else None,
    )


class _Draft:
    """A good record of a topic, to be spoiled."""

    def __init__(self, rng: random.Random, topic: str, request_id: str, victim: str) -> None:
        self.rng = rng
        self.topic = topic
        self.request_id = request_id
        self.headers: list[tuple[str, bytes]] = [(REQUEST_ID, request_id.encode())]
        self.key: bytes | None = (victim if topic == TOKENS else request_id).encode()
        self.body = _good(rng, topic, request_id)
        self.value: bytes | None = msgpack.packb(self.body)
        if topic in (RETRY_SHORT, RETRY_LONG):
            self.headers += [(TARGET, rng.choice(POOL_TOPICS).encode()), (NOT_BEFORE_MS, b"1")]

    def repack(self) -> None:
        if self.topic == WORKERS and self.body:
            self.body["request_ms"] = -1.0  # whatever else was spoiled, or mended
        self.value = msgpack.packb(self.body)


def _good(rng: random.Random, topic: str, request_id: str) -> Map:
    """Return a body that is valid, or nearly: see the module."""
    if topic == REQUESTS:
        return _request(rng)
    if topic in WORK_TOPICS:
        return {
            "request_id": request_id,
            "request": _request(rng),
            "reply": {"topic": TOKENS, "partition": rng.randrange(2), "start": 0},
            "origin": {"partition": 0, "offset": rng.randrange(1_000)},
            "seed": rng.getrandbits(60),
            "received_ms": 1,
            "deadline_ms": 2**45,
            "hop": rng.choice([0, 0, 1]),
            "intent": {"intent": "return_refund", "confidence": 0.9},
            "retrieval": {"passages": [{"text": "Shoes can be returned.", "passage_id": "p"}]},
        }
    if topic == CONTROL:
        return {"kind": "cancel", "request_id": request_id, "tenant": "default", "sent_ms": 1}
    if topic == ROUTES:
        return {"pool": "generation", "version": 1, "weights": {"blue": 9_999}}  # never whole
    if topic == WORKERS:
        status = {
            "worker_id": request_id,
            "pool": "generation",
            "colour": "blue",
            "state": "ready",
            "updated_ms": 2**45,
        }
        return status | {rng.choice(["lag", "tokens_in_flight", "num_queued"]): -1 - rng.randrange(2**40)}
    if topic == DOCUMENTS:
        return {"document_id": request_id, "text": "  "}  # never a text
    return {"kind": "delta", "epoch": [-9, 0], "owner": "fuzz", "seq": 0, "text": "FUZZ"}  # never claimed


def _request(rng: random.Random) -> Map:
    return {"prompt": "tell me", "max_tokens": rng.randrange(1, 40), "strategy": "dialogue", "retrieval": "off"}


# How records are spoiled. Each has a weight: what is large comes rarely.


def _null(draft: _Draft) -> None:
    draft.value = None


def _empty(draft: _Draft) -> None:
    draft.value = b""


def _noise(draft: _Draft) -> None:
    draft.value = draft.rng.randbytes(draft.rng.randrange(1, 3_000))


def _truncated(draft: _Draft) -> None:
    assert draft.value is not None
    draft.value = draft.value[: draft.rng.randrange(len(draft.value))]


def _extended(draft: _Draft) -> None:
    assert draft.value is not None
    draft.value += draft.rng.randbytes(draft.rng.randrange(1, 50))


def _flipped(draft: _Draft) -> None:
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


def _wrong_values(draft: _Draft) -> None:
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


def _misled(draft: _Draft) -> None:
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


def _untyped(draft: _Draft) -> None:
    """A body of another shape altogether."""
    body = draft.rng.choice(
        [[], [draft.body], "text", 7, None, {}, {"a": draft.body}, {1: 2}, {b"k": 1}, list(draft.body)]
    )
    draft.value = msgpack.packb(body)


def _missing(draft: _Draft) -> None:
    for name in draft.rng.sample(list(draft.body), draft.rng.randrange(1, len(draft.body) + 1)):
        del draft.body[name]
    if draft.topic in VIEW_TOPICS:
        draft.body.clear()
    draft.repack()


def _huge(draft: _Draft) -> None:
    size = draft.rng.randrange(300_000, MAX_BYTES)
    name = draft.rng.choice(["prompt", "system", "text", "owner", "unknown", "request_id"])
    filled = {name: "x" * (size - 1_000)}
    draft.value = msgpack.packb(draft.body | ({"request": filled} if "request" in draft.body else filled))


def _many(draft: _Draft) -> None:
    """A great many small items: each costs more memory than bytes."""
    item = draft.rng.choice([b"\x80", b"\x90", b"\xc0", b"\xa0"])
    count = draft.rng.randrange(65_000, 70_000)
    draft.value = b"\x81\xa8messages\xdd" + count.to_bytes(4, "big") + item * count


def _deep(draft: _Draft) -> None:
    depth = draft.rng.choice([30, 500, 1_023, 5_000, 100_000])
    draft.value = draft.rng.choice([b"\x91", b"\x81\xa1a"]) * depth + b"\xc0"


def _deep_json(draft: _Draft) -> None:
    depth = draft.rng.choice([30, 1_000, 100_000])
    opening, closing = draft.rng.choice([(b"[", b"]"), (b'{"a":', b"}")])
    body = b'{"prompt": "x", "a": ' + opening * depth + b"1" + closing * depth + b"}"
    _as_json(draft, body[: draft.rng.choice([len(body), len(body) // 2])])


def _json(draft: _Draft) -> None:
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


def _as_json(draft: _Draft, body: bytes) -> None:
    draft.value = body
    draft.headers.append((CONTENT_TYPE, JSON.encode()))


def _bomb(draft: _Draft) -> None:
    """A few bytes that announce gigabytes, or hold them compressed."""
    length = draft.rng.choice([2**32 - 1, 2**31, 2**24])
    head = draft.rng.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]) + length.to_bytes(4, "big")
    plain = draft.rng.choice([head, b"\x81\xa6prompt" + head, b"\x91" * 20 + head, head * 200])
    draft.value = draft.rng.choice([plain, gzip.compress(bytes(1_000_000), mtime=0), plain + bytes(5_000)])


def _extension(draft: _Draft) -> None:
    draft.value = b"\x81\xa6prompt" + msgpack.packb(msgpack.ExtType(draft.rng.randrange(128), b"x" * 100))


def _bad_id(draft: _Draft) -> None:
    bad = draft.rng.choice(
        [b"", b"\xff\xfe", b"a b", b"x" * 129, b"x" * 100_000, b"\x00", b"../..", "é".encode(), b"\n"]
    )
    draft.headers = [(name, value) for name, value in draft.headers if name != REQUEST_ID]
    if draft.rng.random() < 0.8:
        draft.headers.append((REQUEST_ID, bad))
    if draft.topic == CONTROL or (draft.rng.random() < 0.5 and "request_id" in draft.body):
        draft.body["request_id"] = bad.decode(errors="replace")
        draft.repack()


def _bad_header(draft: _Draft) -> None:
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


def _many_headers(draft: _Draft) -> None:
    draft.headers += [(f"h{number}", draft.rng.randbytes(20)) for number in range(draft.rng.randrange(100, 2_000))]
    draft.headers += [(TENANT, b"a"), (TENANT, b"\xff")]


def _bad_version(draft: _Draft) -> None:
    version = draft.rng.choice(["gea.request.v2", "gea.token.v9", "gea.worker.v1", "", "v1", "x" * 10_000])
    draft.headers.append((CE_TYPE, version.encode() or b"\xff"))


def _bad_key(draft: _Draft) -> None:
    draft.key = draft.rng.choice([None, b"", b"\xff\xfe", b"x" * 100_000, b"\x00"])
    draft.value = draft.rng.choice([b"\xc1", b"\x80", None if draft.key else b""])


KINDS: dict[str, tuple[int, Callable[[_Draft], None]]] = {
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
