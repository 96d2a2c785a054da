"""A request asked in a task of its own, wherever in the pools it stands, and how it must have been cancelled."""

from __future__ import annotations

import asyncio

from schemas.control import Control, ControlKind
from schemas.tokens import EndStatus, FinishReason, Kind
from schemas.worker import Pool
from streams.answer import Answer
from streams.client import GeaClient
from streams.control import send_control
from streams.topics import DEAD_LETTER, pool_topic
from tests.fakes import FakeClock
from tests.flow.harness import DIALOGUE, FixedAnnotator, Installation
from tests.flow.holds import Gate
from tests.flow.records import all_committed
from tests.streams.token_fakes import until
from workers.generation.engine.fake import FakeEngine

TOPICS = {pool: pool_topic(pool, "blue") for pool in Pool}
ANNOTATING = (Pool.INTENT, Pool.RETRIEVAL)


def annotator(gea: Installation, pool: Pool) -> FixedAnnotator:
    return gea.intent if pool is Pool.INTENT else gea.retrieval


async def heard(gea: Installation, request_id: str = "r-1", tenant: str = "default") -> None:
    """Wait until every worker knows that a request is cancelled."""
    await until(lambda: all(worker.cancellations.is_cancelled(request_id, tenant) for worker in gea.workers.values()))


async def asking(client: GeaClient, request_id: str = "r-1", **options: object) -> asyncio.Task[Answer]:
    """Ask in a task of its own."""
    return asyncio.create_task(
        client.generate("How long can I return shoes?", request_id=request_id, **options).answer()  # type: ignore[arg-type]
    )


async def occupied(gea: Installation, client: GeaClient, engine: FakeEngine, gate: Gate) -> asyncio.Task[Answer]:
    """Start a worker of each pool, and let a first request, `r-0`, stand in the engine at the gate."""
    await gea.start_all(engine)
    first = await asking(client, "r-0", **DIALOGUE)
    await gate.reached.wait()
    return first


async def arrived(gea: Installation, topic: str, num_records: int = 1) -> None:
    async with asyncio.timeout(5):
        await gea.broker.until(lambda: len(gea.broker.records(topic)) >= num_records)


async def check_cancelled_once(gea: Installation, answer: Answer, reason: str, *, text: str = "") -> None:
    """One `cancelled` record, with its reason; everything is acknowledged and nothing was put aside."""
    assert (answer.end.status, answer.end.finish_reason) == (EndStatus.CANCELLED, FinishReason.ABORT)
    assert answer.end.failure is not None
    assert (answer.end.failure.code, answer.end.failure.message) == ("cancelled", reason)
    assert answer.text == text
    assert [record.kind for record in gea.tokens_of(answer.request_id)].count(Kind.END) == 1
    for pool in {worker.handler.pool for worker in gea.workers.values()}:
        await all_committed(gea, TOPICS[pool], pool)
    assert gea.broker.records(DEAD_LETTER) == []
    assert all(worker.cancellations.statistics()["watched"] == 0 for worker in gea.workers.values())


class Leased:
    """An installation whose leases run by a clock of ours."""

    def __init__(self, gea: Installation) -> None:
        self.clock = FakeClock(0)
        self.gea = gea
        gea.clock = lambda: self.clock() / 1000

    async def watched(self, pool: Pool) -> None:
        """Wait until a pool watches over a lease and hears its readers."""
        leases = self.gea.workers[f"{pool}-1"].cancellations.leases
        await until(lambda: leases.num_held > 0 and leases.is_hearing)

    async def alive(self, request_id: str = "r-1") -> None:
        """Have a reader say that he is there, and every worker hear it."""
        before = {name: worker.cancellations for name, worker in self.gea.workers.items()}
        producer = await self.gea.broker.producer()
        await send_control(producer, Control(kind=ControlKind.ALIVE, request_id=request_id))
        await until(lambda: all(each.statistics()["readers"] for each in before.values()))
