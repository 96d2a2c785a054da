"""What the engine is told of a request beside its prompt: how urgent it is, and whose."""

from __future__ import annotations

from typing import Any

import pytest

from schemas.request import Priority
from schemas.worker import Pool
from tests.flow.continued import ask, start_path
from tests.flow.harness import DIALOGUE, installation
from tests.workers.generation.engine.asking import local
from tests.workers.generation.fakes import ScriptedModel
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


async def test_a_prompt_that_was_read_before_counts_as_cached_within_its_tenant() -> None:
    engine: Any = local(ScriptedModel("Hello."), max_context=1_024)  # keeps the contract of the scripted one
    async with installation() as gea, gea.client() as client, gea.client(tenant="shop") as other:
        await start_path(gea, engine)
        usages = [(await asking.complete("tell me", **DIALOGUE)).end.usage for asking in (client, client, other)]
    num_cached = [usage.cached_tokens for usage in usages]
    assert num_cached[0] == num_cached[2] == 0
    assert 0 < num_cached[1] < usages[1].prompt_tokens
