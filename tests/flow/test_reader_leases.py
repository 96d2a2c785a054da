"""A reader who is gone is missed after his lease, and his request is cancelled."""

from __future__ import annotations

import pytest

from schemas.control import Control, ControlKind
from schemas.request import Retrieval, Strategy
from schemas.worker import Pool
from streams.control import send_control
from tests.flow.asked import ANNOTATING, Leased, annotator, asking, check_cancelled_once
from tests.flow.harness import DIALOGUE, installation
from tests.flow.holds import Gate
from tests.streams.token_fakes import until
from workers.generation.engine.fake import FakeEngine


@pytest.mark.parametrize("pool", [*ANNOTATING, Pool.GENERATION])
async def test_a_request_whose_reader_is_gone_is_cancelled_in_every_pool(pool: Pool) -> None:
    gate = Gate(stop_at=6)
    async with installation() as gea, gea.client() as client:
        leased = Leased(gea)
        if pool is not Pool.GENERATION:
            annotator(gea, pool).gate.clear()
        await gea.start_all(FakeEngine("Within 30 days.", pause=gate))
        strategy = Strategy.DIALOGUE if pool is Pool.GENERATION else None
        retrieval = Retrieval.OFF if pool is Pool.GENERATION else Retrieval.AUTO
        asked = await asking(client, reader_lease_s=30.0, strategy=strategy, retrieval=retrieval)
        if pool is Pool.GENERATION:
            await gate.reached.wait()
        await leased.watched(pool)
        await leased.alive()
        leased.clock.advance(29_000)
        await leased.alive("another")
        assert not asked.done()
        leased.clock.advance(2_000)
        await check_cancelled_once(gea, await asked, "reader is gone", text="Within" if pool is Pool.GENERATION else "")


async def test_a_reader_who_speaks_up_keeps_a_request_alive_and_is_missed_when_he_falls_silent() -> None:
    gate = Gate(stop_at=6)
    async with installation() as gea, gea.client() as client:
        leased = Leased(gea)
        await gea.start_all(FakeEngine("Within 30 days.", pause=gate))
        asked = await asking(client, reader_lease_s=30.0, **DIALOGUE)
        await gate.reached.wait()
        await leased.watched(Pool.GENERATION)
        leases = gea.workers["generation-1"].cancellations.leases
        for _ in range(5):
            leased.clock.advance(20_000)
            await send_control(await gea.broker.producer(), Control(kind=ControlKind.ALIVE, request_id="r-1"))
            at = leased.clock() / 1000
            await until(lambda at=at: leases.last_heard(("r-1", "default")) == at)  # type: ignore[misc]
        assert not asked.done()
        leased.clock.advance(30_000)
        await check_cancelled_once(gea, await asked, "reader is gone", text="Within")
