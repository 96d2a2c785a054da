"""A dead letter that is sent in again is answered once, however often that is repeated."""

from __future__ import annotations

import asyncio

from ops.dlq import DeadLetterLog, LetterFilter
from ops.redrive import Step, redrive_letters
from schemas.codec import pack
from schemas.errors import InternalError
from schemas.request import GenerationRequest
from schemas.tokens import EndStatus, Kind
from schemas.worker import Pool
from streams.dead_letter import dead_letter
from streams.topics import DEAD_LETTER, REQUESTS
from tests.flow.harness import DIALOGUE, Installation, installation
from tests.flow.records import all_committed, end_of, send_raw, view_of
from workers.generation.engine.fake import FakeEngine

TEXT = "Within 30 days."


async def bury(gea: Installation, body: bytes, request_id: str) -> None:
    """Put a request aside, as a worker does that could not handle it."""
    producer = await gea.broker.producer()
    record = await producer.send(REQUESTS, body, key=b"k", headers=(("request_id", request_id.encode()),))
    await dead_letter(producer, record, InternalError("boom"), "router-1")


async def redrive(gea: Installation, *, is_again: bool = False) -> list[Step]:
    log = await DeadLetterLog.open(gea.broker)
    return [step async for step in redrive_letters(gea.broker, log, LetterFilter(), is_again=is_again)]


async def test_a_redriven_request_is_answered_under_its_new_id_and_a_repeat_points_to_that_answer() -> None:
    async with installation() as gea, gea.client() as client:
        await bury(gea, pack(GenerationRequest(prompt="tell me", **DIALOGUE)), "r-1")
        (step,) = await redrive(gea)
        await gea.start_all(FakeEngine(TEXT))
        end = await end_of(gea, client, step.request_id)
        assert end.status is EndStatus.COMPLETED
        assert view_of(gea, step.request_id).text() == TEXT
        await redrive(gea, is_again=True)
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        kinds = [record.kind for record in gea.tokens_of(step.request_id)]
        assert (kinds.count(Kind.END), kinds.count(Kind.SEE)) == (1, 1)


async def test_a_repeat_without_the_markers_still_has_one_effective_end() -> None:
    async with installation() as gea, gea.client() as client:
        await bury(gea, pack(GenerationRequest(prompt="tell me", **DIALOGUE)), "r-1")
        (step,) = await redrive(gea)
        engine = FakeEngine(TEXT)
        await gea.start_all(engine)
        first = await end_of(gea, client, step.request_id)
        num_runs = len(engine.requests)
        await gea.stop("router-1")
        await gea.start(Pool.ROUTER, "router-2")  # one that has not seen the first
        gea.store.down = True
        await redrive(gea, is_again=True)
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        async with asyncio.timeout(10):
            await gea.broker.until(lambda: Kind.SEE in [record.kind for record in gea.tokens_of(step.request_id)])
        view = view_of(gea, step.request_id)
        assert (view.text(), view.end) == (TEXT, first)
        assert len(engine.requests) == num_runs


async def test_what_fails_again_is_a_new_letter_that_says_where_it_came_from() -> None:
    async with installation() as gea:
        await gea.start(Pool.ROUTER, "router-1")
        await send_raw(gea, b"\xc1", [("request_id", "r-1")])
        await gea.broker.until(lambda: len(gea.broker.records(DEAD_LETTER)) == 1)
        log = await DeadLetterLog.open(gea.broker)
        steps = [step async for step in redrive_letters(gea.broker, log, LetterFilter(), is_forced=True)]
        assert len(steps) == 1  # not the letter that it becomes again
        await all_committed(gea, REQUESTS, Pool.ROUTER)
        log = await DeadLetterLog.open(gea.broker)
        letters = [stored async for stored in log.letters(LetterFilter())]
        assert sorted(letter.redriven_from for letter in letters) == ["", steps[0].stored.place]
