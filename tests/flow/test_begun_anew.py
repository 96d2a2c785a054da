"""A text that a worker cannot continue is voided in front of readers, and begun anew."""

from __future__ import annotations

import asyncio

import pytest

from schemas.tokens import EndStatus, Kind
from schemas.worker import Pool
from streams.client import GeaClient
from tests.flow import planners
from tests.flow.continued import NUM_TOKENS, SCRIPT, SHORT, TEXT, ask, check_end, cut_at, published, start_path
from tests.flow.engines import Brief, Forgetful, OtherBackend, OtherWeights
from tests.flow.harness import Installation, installation
from tests.flow.holds import Gate
from tests.flow.records import view_of
from workers.generation.engine.fake import FakeEngine


async def check_begun_anew(gea: Installation, client: GeaClient, follower: FakeEngine, text: str) -> None:
    """Let a worker die at its seventh token; its follower voids the text and says its own."""
    gate = Gate(stop_at=7)
    asking = asyncio.create_task(ask(client, **SHORT))
    await start_path(gea, FakeEngine(SCRIPT, pause=gate))
    await gate.reached.wait()
    await published(gea, 7)
    await gea.kill("generation-1")
    await gea.start(Pool.GENERATION, "generation-2", follower)
    heard = await asking
    num_tokens = len(text.encode()) + 1
    assert (heard.texts[0], heard.num_resets, len(heard.token_ids[0])) == (text, 1, num_tokens)
    check_end(heard.end, num_tokens)
    kinds = [record.kind for record in gea.tokens_of("r-1")]
    assert (kinds.count(Kind.RESET), kinds.count(Kind.END)) == (1, 1)
    assert view_of(gea, "r-1").origin is not None  # told again behind the reset


@pytest.mark.parametrize(
    "follower",
    [OtherWeights("something else"), OtherBackend("something else"), Forgetful("something else"), Forgetful("é")],
    ids=["other weights", "another backend", "other tokens", "an early end"],
)
async def test_a_text_that_cannot_be_continued_is_voided_and_begun_anew(follower: FakeEngine) -> None:
    script = follower._script
    async with installation() as gea, gea.client() as client:
        await check_begun_anew(gea, client, type(follower)(script), script(None, 0))  # type: ignore[arg-type]


async def test_a_text_of_which_only_the_beginning_comes_again_is_voided_and_begun_anew() -> None:
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, 7)
        await gea.start(Pool.GENERATION, "generation-2", Brief(SCRIPT))
        heard = await asking
        assert (heard.texts[0], heard.num_resets, len(heard.token_ids[0])) == ("é", 1, 2)
        assert heard.end is not None
        assert (heard.end.status, heard.end.usage.completion_tokens) == (EndStatus.INCOMPLETE, 2)


async def test_a_text_of_another_release_is_voided_and_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, 7)
        monkeypatch.setattr(planners, "TEMPLATE", planners.TEMPLATE.replace("im_start", "im_begin"))
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT))
        heard = await asking
        assert (heard.texts[0], heard.num_resets) == (TEXT, 1)
        check_end(heard.end, NUM_TOKENS)
