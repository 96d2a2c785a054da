"""Fuzzed records on every topic of an installation in memory: nothing falls over, nothing is lost, nothing stays."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import islice

import numpy as np
import pytest

from schemas.codec import pack
from schemas.document import Document
from streams.topics import DOCUMENTS
from tests.flow.besieged import MAX_SLOWDOWN, groups
from tests.flow.harness import Installation, installation
from tests.fuzz_draft import ALL_TOPICS, WORK_TOPICS
from tests.fuzz_kinds import KINDS
from tests.fuzzing import fuzz
from tests.siege import TEXT, Siege
from workers.encoder import Vectors
from workers.generation.engine.fake import FakeEngine
from workers.retrieval.follower import DocumentFollower
from workers.retrieval.knowledge import KnowledgeBase

ROUND = 250
MEASURE_EVERY = 5  # rounds: the first time everything is warm
MAX_GROWTH_BYTES = 4_000_000
LOGS = ("streams/memory",)
"""The logs and stores of this process: what stands in a topic is not what a worker holds."""


class FlatEncoder:
    """Encodes every text alike."""

    identity = "flat"
    dimension = 8

    async def encode_async(self, texts: Sequence[str]) -> Vectors:
        return np.full((len(texts), 8), 8**-0.5, dtype=np.float32)


@asynccontextmanager
async def library(gea: Installation) -> AsyncIterator[DocumentFollower]:
    """A retrieval worker's view of the documents."""
    knowledge = KnowledgeBase(FlatEncoder())
    follower = DocumentFollower(gea.broker, DOCUMENTS, knowledge)
    await follower.catch_up()
    following = asyncio.create_task(follower.follow())
    try:
        yield follower
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await follower.close()
        knowledge.close()


def expire_everything(gea: Installation) -> None:
    """Empty the logs, as retention does, up to what everybody has read."""
    for topic in (*ALL_TOPICS, "gea.dead-letter"):
        for place in gea.broker.places(topic):
            gea.broker.expire(topic, place.partition, gea.broker.log(place).end)


def bytes_held() -> int:
    """Return the bytes that our code holds, without logs and stores in memory."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot()
    total = 0
    for trace in snapshot.traces:
        name = trace.traceback[0].filename
        if "/tests/" not in name and not any(part in name for part in LOGS):
            total += trace.size
    return total


async def besiege(seed: int, count: int) -> str:
    """Fuzz an installation and return the figures."""
    async with installation() as gea, gea.client(60) as client, library(gea) as documents:

        async def is_committed() -> bool:
            return all(
                (gea.broker.committed(group, place) or 0) == gea.broker.log(place).end
                for topic, group in groups().items()
                for place in gea.broker.places(topic)
            )

        engine = FakeEngine(TEXT)
        await gea.start_all(engine)
        siege = Siege(gea, client, await gea.broker.producer(), is_committed)
        before = await siege.pace()
        held: list[int] = []
        for number in range(count // ROUND):
            victim = f"victim-{number}"
            await siege.round(list(islice(fuzz(seed + number, ROUND, victim=victim), ROUND)), victim)
            siege.ledger.forget()
            gea.store._values.clear()
            engine.requests.clear()
            expire_everything(gea)
            if tracemalloc.is_tracing() and number % MEASURE_EVERY == MEASURE_EVERY - 1:
                held.append(bytes_held())
        assert siege.num_sent == count // ROUND * ROUND
        await siege.assert_views_intact()
        await siege.producer.send(DOCUMENTS, pack(Document(document_id="good", text="text")), key=b"good")
        await documents.until_applied(documents.num_applied + 1)
        assert documents.num_broken > 0
        after = await siege.pace()
        assert after > before / MAX_SLOWDOWN, (before, after)
        if held:
            assert held[-1] - held[0] < MAX_GROWTH_BYTES, held
        return f"{siege.figures()}, {before:.0f} requests per CPU second before, {after:.0f} after, {held} bytes held"


@pytest.mark.parametrize("seed", [1])
async def test_a_thousand_fuzzed_records_are_each_accounted_for_and_do_no_harm(seed: int) -> None:
    await besiege(seed, 1_000)


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_ten_thousand_fuzzed_records_leave_memory_and_pace_as_they_were() -> None:
    tracemalloc.start()
    try:
        await besiege(1_000, 10_000)
    finally:
        tracemalloc.stop()


def test_the_same_seed_gives_the_same_records_of_every_kind_on_every_topic() -> None:
    records = list(fuzz(7, 3_000))
    assert records == list(fuzz(7, 3_000))
    assert records != list(fuzz(8, 3_000))
    assert {record.topic for record in records} == set(ALL_TOPICS) > set(WORK_TOPICS)
    assert {record.kind for record in records} == set(KINDS)
