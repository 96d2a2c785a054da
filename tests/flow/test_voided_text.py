"""A text that was voided and not yet begun anew counts for nothing: not for readers, and not for the session."""

from __future__ import annotations

import asyncio

import pytest

from schemas.tokens import EndStatus
from schemas.worker import Pool
from streams.topics import TOKENS
from tests.flow.cancelled import cancel
from tests.flow.continued import GENERATION, NUM_TOKENS, SCRIPT, TEXT, check_end, cut_at
from tests.flow.engines import Brief, OtherWeights
from tests.flow.harness import installation
from tests.flow.planners import held_planner
from tests.flow.records import all_committed, view_of
from workers.generation.engine.fake import FakeEngine


@pytest.mark.parametrize(("follower", "num_plans_before"), [(OtherWeights, 0), (Brief, 1)])
async def test_a_cancel_after_the_text_was_voided_remembers_nothing_of_it(
    follower: type[FakeEngine], num_plans_before: int
) -> None:
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, 9, session_id="s")
        planner = held_planner(num_plans_before)
        gea.planner = lambda: planner
        await gea.start(Pool.GENERATION, "generation-2", follower(SCRIPT))
        async with asyncio.timeout(5):
            await planner.held.wait()
            await gea.broker.until(lambda: not view_of(gea, "r-1").text())
        cancel(gea, name="generation-2")
        heard = await asking
        assert heard.end is not None
        assert (heard.end.status, heard.end.usage.completion_tokens) == (EndStatus.CANCELLED, 0)
        assert (heard.texts[0], heard.num_resets) == ("", 1)
        assert await gea.sessions().last_turns("default", "s", 1) == ()


async def test_a_text_whose_beginning_has_left_its_topic_is_voided_and_begun_anew() -> None:
    follower = FakeEngine(SCRIPT)
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, 9)
        (first, *_) = (record for record in gea.broker.records(TOKENS) if record.key == b"r-1")
        gea.broker.expire(TOKENS, first.partition, first.offset + 1)
        await gea.start(Pool.GENERATION, "generation-2", follower)
        heard = await asking
        assert (heard.texts[0], heard.num_resets) == (TEXT, 1)
        check_end(heard.end, NUM_TOKENS)
        (request,) = follower.requests
        assert not any(request.output)
        await all_committed(gea, GENERATION, Pool.GENERATION)
