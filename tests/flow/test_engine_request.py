"""What the engine is told of a request beside its prompt: how urgent it is, and whose."""

from __future__ import annotations

import pytest

from schemas.request import Priority
from schemas.worker import Pool
from tests.flow.continued import ask, start_path
from tests.flow.harness import DIALOGUE, installation
from workers.generation.engine.fake import FakeEngine


@pytest.mark.parametrize(
    ("tenant", "priority", "rank"),
    [("default", Priority.NORMAL, 0), ("shop", Priority.HIGH, -1), ("shop", Priority.LOW, 1)],
)
async def test_priority_and_tenant_reach_the_engine(tenant: str, priority: Priority, rank: int) -> None:
    """The tenant is the envelope's: prefixes of a prompt are shared within it only."""
    engine = FakeEngine("Hello.")
    async with installation() as gea, gea.client(tenant=tenant) as client:
        await start_path(gea, engine)
        await ask(client, priority=priority, **DIALOGUE)
    assert [(request.priority, request.cache_salt) for request in engine.requests] == [(rank, tenant)]


async def test_an_engine_that_died_makes_its_worker_say_so() -> None:
    engine = FakeEngine("Hello.")
    async with installation() as gea:
        running = await gea.start(Pool.GENERATION, "generation-1", engine)
        engine.die("killed")
        status = running.worker.status()
    assert (status.state, status.reason) == ("failed", "killed")
