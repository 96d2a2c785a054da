"""A worker that dies in the middle of an answer is followed by one that goes on with the same text."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from schemas.codec import unpack
from schemas.envelope import RoutedRequest
from schemas.intent import IntentResult
from schemas.request import Strategy
from schemas.worker import Pool
from streams.memory_store import MemoryStore
from streams.topics import TOKENS
from tests.flow import planners
from tests.flow.continued import (
    GENERATION,
    NUM_TOKENS,
    SCRIPT,
    SHORT,
    TEXT,
    ask,
    check_end,
    check_once,
    cut_at,
    published,
    start_path,
)
from tests.flow.harness import FixedAnnotator, installation
from tests.flow.holds import Gate
from tests.flow.records import all_committed
from workers.generation.engine import EngineRequest
from workers.generation.engine.fake import FakeEngine


@pytest.mark.parametrize("num_tokens", range(NUM_TOKENS))
async def test_an_answer_cut_at_any_token_goes_on_with_the_same_text(num_tokens: int) -> None:
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, num_tokens)
        follower = FakeEngine(SCRIPT)
        await gea.start(Pool.GENERATION, "generation-2", follower)
        heard = await asking
        assert (heard.texts[0], heard.num_resets, len(heard.token_ids[0])) == (TEXT, 0, NUM_TOKENS)
        check_end(heard.end, NUM_TOKENS)
        check_once(gea, {0: NUM_TOKENS})
        assert [len(output) for request in follower.requests for output in request.output] == [num_tokens][:num_tokens]
        await all_committed(gea, GENERATION, Pool.GENERATION)


def greeting(routed: RoutedRequest) -> RoutedRequest:
    return msgspec.structs.replace(routed, intent=IntentResult(intent="greeting", confidence=1.0, language="en"))


class HangingStore(MemoryStore):
    """Remembers no turn: the call never returns while `hangs`."""

    def __init__(self) -> None:
        super().__init__()
        self.hangs = True
        self.reached = asyncio.Event()

    async def append(self, key: str, item_id: str, item: bytes, *, max_items: int, ttl_s: float) -> bool:
        if self.hangs:
            self.reached.set()
            await asyncio.Event().wait()
        return await super().append(key, item_id, item, max_items=max_items, ttl_s=ttl_s)


@pytest.mark.parametrize("strategy", [Strategy.DIALOGUE, Strategy.TEMPLATE])
async def test_an_answer_whose_text_is_out_but_not_its_end_gets_its_end_alone(strategy: Strategy) -> None:
    async with installation() as gea, gea.client() as client:
        gea.store = store = HangingStore()
        gea.intent = FixedAnnotator(Pool.INTENT, greeting)
        await gea.start_all(FakeEngine(SCRIPT))
        asking = asyncio.create_task(ask(client, **{**SHORT, "strategy": strategy, "session_id": "s"}))
        await store.reached.wait()
        expected = (TEXT, NUM_TOKENS) if strategy is Strategy.DIALOGUE else (planners.GREETING, len(planners.GREETING))
        await published(gea, expected[1])
        await gea.kill("generation-1")
        store.hangs = False
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT))
        heard = await asking
        assert (heard.texts[0], heard.num_resets, len(heard.token_ids[0])) == (expected[0], 0, expected[1])
        assert heard.end is not None
        assert heard.end.usage.completion_tokens == expected[1]
        check_once(gea, {0: expected[1]})
        (turn,) = await gea.sessions().last_turns("default", "s", 3)
        assert turn.assistant == expected[0]


async def test_every_choice_goes_on_where_it_stood() -> None:
    texts = (SCRIPT, "a second, longer 你好 answer, which comes to its own end")
    gate = Gate(stop_at=10)

    def script(request: EngineRequest, index: int) -> str:
        return texts[index]

    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(script, pause=gate))
        asking = asyncio.create_task(ask(client, n=2, **SHORT))
        await gate.reached.wait()
        await published(gea, 10, index=0)
        await published(gea, 10, index=1)
        await gea.kill("generation-1")
        follower = FakeEngine(script)
        await gea.start(Pool.GENERATION, "generation-2", follower)
        heard = await asking
        num_second = len(texts[1].encode()) + 1  # and the token that ends it
        assert (heard.texts, heard.num_resets) == ({0: TEXT, 1: texts[1]}, 0)
        check_end(heard.end, NUM_TOKENS + num_second)
        check_once(gea, {0: NUM_TOKENS, 1: num_second})
        claims = [record.claim for record in gea.tokens_of("r-1") if record.claim is not None]
        assert [claim.from_seq for claim in claims] == [(0, 0), (0,), (10, 10)]  # fresh, bare, said again


async def test_a_choice_that_has_not_begun_begins_with_the_follower() -> None:
    gate = Gate(stop_at=1)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=gate))
        asking = asyncio.create_task(ask(client, n=2, **SHORT))
        await published(gea, 1, index=0)
        await gea.kill("generation-1")
        again = Gate(stop_at=5)
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT, pause=again))
        await again.reached.wait()
        await published(gea, 5, index=1)
        await gea.kill("generation-2")
        await gea.start(Pool.GENERATION, "generation-3", FakeEngine(SCRIPT))
        heard = await asking
        assert (heard.texts, heard.num_resets) == ({0: TEXT, 1: TEXT}, 0)
        check_end(heard.end, 2 * NUM_TOKENS)
        check_once(gea, {0: NUM_TOKENS, 1: NUM_TOKENS})


async def test_the_time_to_the_first_token_is_that_of_the_run_that_wrote_it() -> None:
    async with installation() as gea, gea.client() as client:
        asking = await cut_at(gea, client, 6)
        first = next(r for r in gea.broker.records(TOKENS) if r.key == b"r-1" and r.value)
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT))
        heard = await asking
        assert heard.end is not None
        (body,) = (unpack(record.value, RoutedRequest) for record in gea.broker.records(GENERATION))
        assert heard.end.timings.ttft_ms == first.timestamp_ms - body.received_ms
