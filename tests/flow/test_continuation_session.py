"""An answer in a session goes on with the prompt of the run that began it, whatever has become of the session."""

from __future__ import annotations

import asyncio

import pytest

from schemas.worker import Pool
from streams.client import GeaClient
from tests.flow.continued import Heard, ask, published, start_path
from tests.flow.harness import DIALOGUE, Installation, installation
from tests.flow.holds import Gate
from workers.generation import beginning
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.script import seeded_script, seeded_text


async def cut_second_turn(gea: Installation, client: GeaClient, first: FakeEngine) -> asyncio.Task[Heard]:
    """Ask twice in a session; the second answer is cut at its tenth token."""
    await start_path(gea, first)
    await client.complete("first question", request_id="r-0", session_id="s", **DIALOGUE)
    gate = Gate(stop_at=10)
    first._pause = gate
    asking = asyncio.create_task(ask(client, "second question", session_id="s", max_tokens=400, **DIALOGUE))
    await gate.reached.wait()
    await published(gea, 10)
    await gea.kill("generation-1")
    return asking


def forget_everything(gea: Installation) -> None:
    gea.store._lists.clear()
    gea.store._values.clear()


@pytest.mark.parametrize("is_forgotten", [False, True])
async def test_a_session_that_is_lost_between_two_runs_does_not_change_the_text(is_forgotten: bool) -> None:
    first, follower = FakeEngine(seeded_script()), FakeEngine(seeded_script())
    async with installation() as gea, gea.client() as client:
        asking = await cut_second_turn(gea, client, first)
        if is_forgotten:
            forget_everything(gea)
        await gea.start(Pool.GENERATION, "generation-2", follower)
        heard = await asking
        begun = first.requests[-1]
        assert follower.requests[0].prompt == begun.prompt
        assert (heard.texts[0], heard.num_resets) == (seeded_text(begun.prompt, begun.sampling.seed), 0)


async def test_a_turn_that_came_in_between_does_not_change_the_text() -> None:
    first, follower = FakeEngine(seeded_script()), FakeEngine(seeded_script())
    async with installation() as gea, gea.client() as client:
        asking = await cut_second_turn(gea, client, first)
        (turn,) = await gea.sessions().last_turns("default", "s", 1)
        between = type(turn)(request_id="r-x", user="in between", assistant="yes")
        await gea.sessions().append_turn("default", "s", between)
        await gea.start(Pool.GENERATION, "generation-2", follower)
        heard = await asking
        assert (follower.requests[0].prompt, heard.num_resets) == (first.requests[-1].prompt, 0)


async def test_a_memory_too_large_for_a_record_is_taken_from_the_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beginning, "MAX_MEMORY_BYTES", 0)
    first, follower = FakeEngine(seeded_script()), FakeEngine(seeded_script())
    async with installation() as gea, gea.client() as client:
        asking = await cut_second_turn(gea, client, first)
        await gea.start(Pool.GENERATION, "generation-2", follower)
        heard = await asking
        assert (follower.requests[0].prompt, heard.num_resets) == (first.requests[-1].prompt, 0)
        assert all(not record.claim.memory for record in gea.tokens_of("r-1") if record.claim)


async def test_without_any_memory_of_a_session_the_text_is_voided_and_begun_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(beginning, "MAX_MEMORY_BYTES", 0)
    first, follower = FakeEngine(seeded_script()), FakeEngine(seeded_script())
    async with installation() as gea, gea.client() as client:
        asking = await cut_second_turn(gea, client, first)
        forget_everything(gea)
        await gea.start(Pool.GENERATION, "generation-2", follower)
        heard = await asking
        anew = follower.requests[0]
        assert anew.prompt != first.requests[-1].prompt
        assert (heard.texts[0], heard.num_resets) == (seeded_text(anew.prompt, anew.sampling.seed), 1)
