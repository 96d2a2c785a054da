"""A worker whose request another run holds waits for that run's end, and not for ever."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from schemas.errors import EngineUnavailableError
from schemas.tokens import End, EndStatus, Epoch, FinishReason, Kind, TokenRecord
from schemas.worker import Pool
from streams.client import GeaClient
from streams.token_record import send_token
from tests.flow.cancelled import cancel, check_cancelled
from tests.flow.continued import GENERATION, SCRIPT, SHORT, TEXT, ask
from tests.flow.harness import Installation, installation
from tests.flow.holds import Gate, HeldReads
from tests.flow.records import REPLY, all_committed, claimed_by_another, end_of
from workers.generation import takeover
from workers.generation.engine.fake import FakeEngine

ABOVE = Epoch(0, 99)  # above every run of our generation


async def start_behind_another(gea: Installation, client: GeaClient, **fields: Any) -> asyncio.Task[Any]:
    """Start a worker on a request that another run holds; it waits for that run's end."""
    await gea.start(Pool.ROUTER, "router-1")
    asking = asyncio.create_task(ask(client, **{**SHORT, **fields}))
    await gea.broker.until(lambda: bool(gea.broker.records(GENERATION)))
    await claimed_by_another(gea, ABOVE)
    await gea.start(Pool.GENERATION, "generation-1", FakeEngine(SCRIPT))
    await gea.broker.until(lambda: len(gea.tokens_of("r-1")) == 2)
    return asking


async def test_a_request_that_another_run_holds_and_leaves_is_produced_again_after_a_lease() -> None:
    async with installation() as gea, gea.client() as client:
        gea.lease_s = 0.05
        asking = await start_behind_another(gea, client)
        heard = await asking
        assert (heard.texts[0], heard.num_resets) == (TEXT, 0)
        assert max(record.epoch.hop for record in gea.tokens_of("r-1")) == 1
        await all_committed(gea, GENERATION, Pool.GENERATION)


async def test_an_engine_that_dies_ends_the_worker_though_a_request_of_the_batch_waits_for_another_run() -> None:
    gate = Gate(stop_at=3)
    engine = FakeEngine(SCRIPT, pause=gate)
    async with installation() as gea, gea.client() as client:
        gea.lease_s = 3_600
        await gea.start(Pool.ROUTER, "router-1")
        asking = [asyncio.create_task(client.complete("tell me", request_id=f"r-{n}", **SHORT)) for n in (1, 2)]
        await gea.broker.until(lambda: len(gea.broker.records(GENERATION)) == 2)
        await claimed_by_another(gea, ABOVE)
        running = await gea.start(Pool.GENERATION, "generation-1", engine)
        await gate.reached.wait()
        await gea.broker.until(lambda: len(gea.tokens_of("r-1")) == 2)
        engine.die("the device is gone")
        with pytest.raises(EngineUnavailableError, match="the device is gone"):
            async with asyncio.timeout(20):
                await running.task
        for each in asking:
            each.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_a_request_that_another_run_ends_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    held = None
    async with installation() as gea, gea.client() as client:
        gea.lease_s = 600
        await gea.start(Pool.ROUTER, "router-1")
        asking = asyncio.create_task(ask(client, **SHORT))
        await gea.broker.until(lambda: bool(gea.broker.records(GENERATION)))
        await claimed_by_another(gea, ABOVE)
        held = HeldReads(gea, monkeypatch)
        engine = FakeEngine(SCRIPT)
        await gea.start(Pool.GENERATION, "generation-1", engine)
        await held.reached.wait()
        await written_by_another(gea, "its text")  # stands in the log when our run begins to read
        held.release()
        heard = await asking
        assert heard.texts[0] == "its text"
        await all_committed(gea, GENERATION, Pool.GENERATION)
        assert not engine.requests
        assert len(gea.broker.records(GENERATION)) == 1


async def written_by_another(gea: Installation, text: str) -> None:
    producer = await gea.broker.producer()
    end = End(status=EndStatus.COMPLETED, finish_reason=FinishReason.STOP)
    ours: dict[str, Any] = {"epoch": ABOVE, "owner": "another"}
    delta = TokenRecord(kind=Kind.DELTA, text=text, token_ids=(1,), **ours)
    await send_token(producer, REPLY, "r-1", delta)
    await send_token(producer, REPLY, "r-1", TokenRecord(kind=Kind.END, seq=1, end=end, **ours))


async def test_a_cancel_while_another_run_holds_the_request_waits_for_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(takeover, "GRACE_S", 0.02)
    async with installation() as gea, gea.client() as client:
        gea.lease_s = 600
        asking = await start_behind_another(gea, client)
        cancel(gea)
        await check_cancelled(gea, (await asking).end)


async def test_a_deadline_while_another_run_holds_the_request_waits_for_no_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(takeover, "GRACE_S", 0.02)
    async with installation() as gea, gea.client() as client:
        gea.lease_s = 600
        asking = await start_behind_another(gea, client, deadline_s=0.2)
        await asyncio.gather(asking, return_exceptions=True)
        end = await end_of(gea, client, "r-1")
        assert end.failure is not None
        assert end.failure.code == "deadline_exceeded"
