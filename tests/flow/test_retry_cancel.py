"""A request that waits for its retry is cancelled where it waits: the router brings it back at once, to be ended."""

from __future__ import annotations

import asyncio

from schemas.tokens import EndStatus
from schemas.worker import Pool
from streams.topics import RETRY_SHORT
from tests.flow.harness import DIALOGUE, installation
from tests.flow.records import end_of
from workers.generation.engine.fake import FakeEngine


class Faulty:
    """A pace for the scripted engine that always fails."""

    async def __call__(self) -> None:
        raise RuntimeError("the device has had a fault")


async def test_a_cancel_reaches_a_request_that_waits_for_its_retry() -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start(Pool.ROUTER, "router-1")
        await gea.start(Pool.GENERATION, "generation-1", FakeEngine("never", pause=Faulty()))
        asking = asyncio.create_task(client.complete("tell me", request_id="r-1", **DIALOGUE))
        async with asyncio.timeout(4):  # the retry itself would be due after it
            await gea.broker.until(lambda: len(gea.broker.records(RETRY_SHORT)) == 1)
            await client.cancel("r-1")
            end = await end_of(gea, client, "r-1")
        assert end.status is EndStatus.CANCELLED
        await asyncio.gather(asking, return_exceptions=True)
