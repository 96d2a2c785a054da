"""Workers die at random while many answers are on their way; the readers of all of them notice nothing."""

from __future__ import annotations

import asyncio
import random

import pytest

from schemas.worker import Pool
from streams.client import GeaClient
from streams.topics import TOKENS, pool_topic
from tests.flow.harness import DIALOGUE, Installation, installation
from tests.flow.records import all_committed, view_of
from workers.generation.engine.fake import FakeEngine, paced
from workers.generation.engine.script import seeded_script, seeded_text

NUMBERS = range(12)
NUM_KILLS = 10
LENGTH = {"min_tokens": 60, "max_tokens": 200}
GENERATION = pool_topic(Pool.GENERATION, "blue")


class Crew:
    """Three generation workers; one that dies is replaced."""

    def __init__(self, gea: Installation) -> None:
        self.engines: list[FakeEngine] = []
        self._gea = gea
        self._names: list[str] = []

    async def start_one(self) -> None:
        engine = FakeEngine(seeded_script(**LENGTH), pause=paced(2))
        self.engines.append(engine)
        self._names.append(f"generation-{len(self.engines)}")
        await self._gea.start(Pool.GENERATION, self._names[-1], engine)

    async def replace(self, draw: random.Random) -> None:
        await self._gea.kill(self._names.pop(draw.randrange(len(self._names))))
        await self.start_one()


async def ask(client: GeaClient, number: int) -> tuple[str, int]:
    """Return the text that a reader has at the end, and how often it was voided."""
    text, num_resets = "", 0
    session_id = f"s-{number % 4}" if number % 2 else None
    async for chunk in client.generate(
        f"question {number}",
        request_id=f"r-{number}",
        max_tokens=300,
        temperature=1.0,
        session_id=session_id,
        **DIALOGUE,
    ):
        num_resets += chunk.is_reset
        text = ("" if chunk.is_reset else text) + chunk.text
    return text, num_resets


async def more_records(gea: Installation, count: int) -> None:
    """Wait until so many more token records are written, or every answer is there."""
    num_records = count + len(gea.broker.records(TOKENS))
    await gea.broker.until(
        lambda: len(gea.broker.records(TOKENS)) >= num_records or all(view_of(gea, f"r-{n}").is_ended for n in NUMBERS)
    )


@pytest.mark.parametrize("seed", range(4))
async def test_no_reader_notices_workers_that_die(seed: int) -> None:
    draw = random.Random(seed)
    async with installation() as gea, gea.client(timeout_s=60) as client:
        await gea.start(Pool.ROUTER, "router-1")
        crew = Crew(gea)
        for _ in range(3):
            await crew.start_one()
        asking = [asyncio.create_task(ask(client, number)) for number in NUMBERS]
        for _ in range(NUM_KILLS):
            await more_records(gea, draw.randint(1, 40))
            await crew.replace(draw)
        heard = await asyncio.gather(*asking)
        await all_committed(gea, GENERATION, Pool.GENERATION)
        said = {
            seeded_text(request.prompt, request.sampling.seed, **LENGTH)
            for engine in crew.engines
            for request in engine.requests
        }
        assert any(request.output for engine in crew.engines for request in engine.requests)  # some were cut
        assert [num_resets for _, num_resets in heard] == [0 for _ in NUMBERS]
        assert all(text in said for text, _ in heard)
        for number in NUMBERS:
            view = view_of(gea, f"r-{number}")
            assert view.end is not None
            assert view.end.usage.completion_tokens == len(view.token_ids())
            assert view.text() == heard[number][0]
