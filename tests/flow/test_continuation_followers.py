"""An answer passes through several workers: some die before they have written, one wakes up late."""

from __future__ import annotations

import asyncio

import pytest

from schemas.tokens import Kind
from schemas.worker import Pool
from tests.flow.continued import (
    NUM_TOKENS,
    SCRIPT,
    SHORT,
    ask,
    check_once,
    check_whole,
    cut_at,
    deltas_that_count,
    halted,
    published,
)
from tests.flow.harness import installation
from tests.flow.holds import Gate, HeldReads
from workers.generation.engine.fake import FakeEngine


@pytest.mark.parametrize("cuts", [(3, 4), (5, 5), (2, 9, 17, 30)])
async def test_workers_that_die_one_after_the_other_leave_one_text(cuts: tuple[int, ...]) -> None:
    async with installation() as gea, gea.client() as client:
        await gea.start(Pool.ROUTER, "router-1")
        asking = None
        for number, (before, cut) in enumerate(zip((0, *cuts), cuts, strict=False)):
            gate = Gate(stop_at=cut - before)
            await gea.start(Pool.GENERATION, f"generation-{number}", FakeEngine(SCRIPT, pause=gate))
            asking = asking or asyncio.create_task(ask(client, **SHORT))
            await gate.reached.wait()
            await published(gea, cut)
            await gea.kill(f"generation-{number}")
        await gea.start(Pool.GENERATION, "generation-last", FakeEngine(SCRIPT))
        assert asking is not None
        heard = await asking
        check_whole(heard)
        check_once(gea, {0: NUM_TOKENS})


@pytest.mark.parametrize("num_tokens", [0, 7])
async def test_a_follower_that_dies_while_it_reads_is_followed_in_turn(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, num_tokens)
        held = HeldReads(gea, monkeypatch)
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT))
        await held.reached.wait()  # it has claimed
        await gea.kill("generation-2")
        held.release()
        await gea.start(Pool.GENERATION, "generation-3", FakeEngine(SCRIPT))
        heard = await asking
        check_whole(heard)
        check_once(gea, {0: NUM_TOKENS})


async def test_a_follower_that_dies_while_it_claims_is_followed_in_turn() -> None:
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, 7)
        starting = asyncio.create_task(gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT)))
        await gea.broker.until(lambda: any(record.kind is Kind.CLAIM for record in gea.tokens_of("r-1")))
        await starting
        await gea.kill("generation-2")
        await gea.start(Pool.GENERATION, "generation-3", FakeEngine(SCRIPT))
        heard = await asking
        check_whole(heard)


async def test_a_paused_owner_that_wakes_up_changes_nothing_for_a_reader() -> None:
    gate = Gate(stop_at=8)
    async with installation() as gea, gea.client() as client:
        asking = await halted(gea, client, gate)
        await published(gea, 8)
        await gea.broker.kill("generation-1")  # it does not notice
        again = Gate(stop_at=4)
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT, pause=again))
        await again.reached.wait()
        await published(gea, 12)
        gate.opened.set()  # it writes on to its end, which does not count
        await gea.broker.until(lambda: any(record.kind is Kind.END for record in gea.tokens_of("r-1")))
        again.opened.set()
        heard = await asking
        check_whole(heard)
        assert [record.kind for record in gea.tokens_of("r-1")].count(Kind.END) == 2
        assert sum(len(record.token_ids) for record in deltas_that_count(gea)) == NUM_TOKENS
