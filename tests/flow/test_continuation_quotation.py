"""A strategy that publishes text of its own, and holds the engine's back, goes on as it was planned."""

from __future__ import annotations

import asyncio

import pytest

from schemas.worker import Pool
from tests.flow.continued import Heard, ask, check_once, published
from tests.flow.harness import PASSAGE, installation
from tests.flow.holds import Gate
from workers.generation.engine.fake import FakeEngine

ADDED = "Shoes can be returned within 30 days. They can be returned, shoes, within days. Nobody knows the moon."
QUESTION = "How many days do I have to return shoes?"


async def undisturbed() -> Heard:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(ADDED))
        return await ask(client, QUESTION)


@pytest.mark.parametrize("num_drawn", [0, 1, 20, 40, 60, 80])
async def test_a_quotation_and_what_the_model_adds_go_on_as_they_were_planned(num_drawn: int) -> None:
    whole = await undisturbed()
    assert whole.end is not None
    assert (whole.end.strategy, len(whole.end.citations) > 0) == ("knowledge", True)
    gate = Gate(stop_at=num_drawn)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(ADDED, pause=gate))
        asking = asyncio.create_task(ask(client, QUESTION))
        await published(gea, len(PASSAGE.text))
        await until_gate_or_end(gate, asking)
        await gea.kill("generation-1")
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(ADDED))
        heard = await asking
        assert (heard.texts, heard.num_resets, heard.token_ids) == (whole.texts, 0, whole.token_ids)
        assert heard.end is not None
        assert (heard.end.citations, heard.end.usage) == (whole.end.citations, whole.end.usage)
        assert heard.end.finish_reason == whole.end.finish_reason
        check_once(gea, {0: len(whole.token_ids[0])})


async def until_gate_or_end(gate: Gate, asking: asyncio.Task[Heard]) -> None:
    reaching = asyncio.create_task(gate.reached.wait())
    await asyncio.wait((reaching, asking), return_when=asyncio.FIRST_COMPLETED)
    reaching.cancel()
