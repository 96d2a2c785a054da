"""What a generation worker says of the tokens that it has still to decode."""

from __future__ import annotations

import asyncio

from schemas.worker import Pool
from tests.flow.continued import SCRIPT, SHORT, TEXT, ask, published, start_path
from tests.flow.harness import installation
from tests.flow.holds import Gate
from tests.streams.token_fakes import until
from workers.generation.engine.fake import FakeEngine


async def test_tokens_that_are_not_decoded_yet_are_counted_until_the_end() -> None:
    gate = Gate(stop_at=9)
    engine = FakeEngine(SCRIPT, pause=gate, max_sequences=1)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine)
        handler = gea.workers["generation-1"].handler
        assert handler.snapshot().tokens_queued == 0
        asking = asyncio.create_task(ask(client, max_tokens=100, **SHORT))
        await published(gea, 9)
        assert handler.snapshot().tokens_queued == 91
        waiting = asyncio.create_task(client.complete("tell me", request_id="r-2", max_tokens=50, **SHORT))
        await until(lambda: engine.statistics().waiting == 1)
        assert handler.snapshot().tokens_queued == 91 + len(engine.requests[-1].prompt) + 50
        gate.opened.set()
        assert (await asking).texts[0] == TEXT
        await waiting
        await until(lambda: handler.snapshot().tokens_queued == 0)
        assert handler.pool is Pool.GENERATION
