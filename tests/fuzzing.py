"""Records made to do harm, for every topic that a worker reads. The same seed gives the same records.

Each is a good record of its topic, spoiled in one way (or bytes that never were one); whoever reads the topic must put
it aside, refuse or ignore it. What could pass for a valid order of an operator (a route table that moves traffic, a
cancel of a good request) is not made here: that is no fuzz, but power.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from schemas.envelope import REQUEST_ID, Headers
from tests.fuzz_draft import ALL_TOPICS, Draft
from tests.fuzz_kinds import KINDS


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
    draft = Draft(rng, topic, request_id, victim)
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
