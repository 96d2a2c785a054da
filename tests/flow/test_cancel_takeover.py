"""A cancel when the worker has died, or while another takes over, ends the request with the text that is out."""

from __future__ import annotations

import pytest

from schemas.worker import Pool
from tests.flow.cancelled import cancel, check_cancelled, text_of
from tests.flow.continued import SCRIPT, Heard, cut_at
from tests.flow.engines import Forgetful, OtherWeights
from tests.flow.harness import Installation, installation
from tests.flow.holds import Gate, HeldReads
from workers.generation.engine.fake import FakeEngine


@pytest.mark.parametrize("kind", [FakeEngine, OtherWeights])
@pytest.mark.parametrize("num_tokens", [0, 9])
async def test_who_takes_a_cancelled_request_over_ends_it_with_the_text_that_is_out(
    num_tokens: int, kind: type[FakeEngine]
) -> None:
    follower = kind(SCRIPT)
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, num_tokens, session_id="s")
        await client.cancel("r-1")
        await gea.start(Pool.GENERATION, "generation-2", follower)
        heard = await asking
        await check_cancelled(gea, heard.end)
        assert heard.texts[0] == text_of(num_tokens)
        assert not follower.requests
        turns = await gea.sessions().last_turns("default", "s", 1)
        assert [turn.assistant for turn in turns] == [text_of(9)][:num_tokens]


async def check_kept(gea: Installation, heard: Heard) -> None:
    """The reader keeps the nine tokens that were out, and so does the session."""
    await check_cancelled(gea, heard.end)
    assert (heard.texts[0], heard.num_resets) == (text_of(9), 0)
    (turn,) = await gea.sessions().last_turns("default", "s", 1)
    assert turn.assistant == text_of(9)


@pytest.mark.parametrize("is_reading", [True, False])
async def test_a_cancel_during_a_take_over_ends_the_request_with_the_text_that_is_out(
    is_reading: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Gate(stop_at=0)
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, 9, session_id="s")
        held = HeldReads(gea, monkeypatch) if is_reading else None
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT, pause=again))
        await (held.reached if held else again.reached).wait()
        cancel(gea, name="generation-2")
        if held:
            held.release()
        await check_kept(gea, await asking)


async def test_a_cancel_before_the_known_text_has_come_again_keeps_all_of_it() -> None:
    again = Gate(stop_at=3)
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, 9, session_id="s")
        await gea.start(Pool.GENERATION, "generation-2", Forgetful(SCRIPT, pause=again))
        await again.reached.wait()
        cancel(gea, name="generation-2")
        await check_kept(gea, await asking)
