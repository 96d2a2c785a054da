"""Good records of every topic that a worker reads, to be spoiled."""

from __future__ import annotations

import random
from typing import Any, TypeAlias

import msgpack

from schemas.envelope import NOT_BEFORE_MS, REQUEST_ID, TARGET
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
Map: TypeAlias = dict[str, Any]


class Draft:
    """A good record of a topic, to be spoiled."""

    def __init__(self, rng: random.Random, topic: str, request_id: str, victim: str) -> None:
        self.rng = rng
        self.topic = topic
        self.request_id = request_id
        self.headers: list[tuple[str, bytes]] = [(REQUEST_ID, request_id.encode())]
        self.key: bytes | None = (victim if topic == TOKENS else request_id).encode()
        self.body = good_body(rng, topic, request_id)
        self.value: bytes | None = msgpack.packb(self.body)
        if topic in (RETRY_SHORT, RETRY_LONG):
            self.headers += [(TARGET, rng.choice(POOL_TOPICS).encode()), (NOT_BEFORE_MS, b"1")]

    def repack(self) -> None:
        if self.topic == WORKERS and self.body:
            self.body["request_ms"] = -1.0  # whatever else was spoiled, or mended
        self.value = msgpack.packb(self.body)


def good_body(rng: random.Random, topic: str, request_id: str) -> Map:
    """Return a body that is valid, or nearly: see `tests.fuzzing`."""
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
