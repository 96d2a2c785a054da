"""A worker that dies in the middle of an answer is followed by one that goes on with the same text."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from schemas.codec import unpack
from schemas.envelope import RoutedRequest
from schemas.intent import IntentResult
from schemas.request import Strategy
from schemas.tokens import EndStatus, Kind
from schemas.worker import Pool
from streams.client import GeaClient
from streams.memory_store import MemoryStore
from streams.topics import TOKENS
from tests.flow import planners
from tests.flow.continued import (
    GENERATION,
    NUM_TOKENS,
    SCRIPT,
    SHORT,
    TEXT,
    Heard,
    ask,
    check_end,
    check_once,
    deltas_that_count,
    published,
    start_path,
)
from tests.flow.engines import Brief, Forgetful, OtherWeights
from tests.flow.harness import DIALOGUE, PASSAGE, FixedAnnotator, Installation, installation
from tests.flow.holds import Gate, HeldReads
from tests.flow.records import all_committed, view_of
from workers.generation import beginning
from workers.generation.engine import EngineRequest
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.script import seeded_script, seeded_text


@pytest.mark.parametrize("num_tokens", range(NUM_TOKENS))
async def test_an_answer_cut_at_any_token_goes_on_with_the_same_text(num_tokens: int) -> None:
    gate = Gate(stop_at=num_tokens)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=gate))
        asking = asyncio.create_task(ask(client, **SHORT))
        await gate.reached.wait()
        await published(gea, num_tokens)
        await gea.kill("generation-1")
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
        assert (heard.texts[0], heard.num_resets) == (TEXT, 0)
        check_end(heard.end, NUM_TOKENS)
        check_once(gea, {0: NUM_TOKENS})


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
    gate = Gate(stop_at=6)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=gate))
        asking = asyncio.create_task(ask(client, **SHORT))
        await published(gea, 6)
        await gea.kill("generation-1")
        first = next(r for r in gea.broker.records(TOKENS) if r.key == b"r-1" and r.value)
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT))
        heard = await asking
        assert heard.end is not None
        (body,) = (unpack(record.value, RoutedRequest) for record in gea.broker.records(GENERATION))
        assert heard.end.timings.ttft_ms == first.timestamp_ms - body.received_ms


@pytest.mark.parametrize("num_tokens", [0, 7])
async def test_a_follower_that_dies_while_it_reads_is_followed_in_turn(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(stop_at=num_tokens)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=gate))
        asking = asyncio.create_task(ask(client, **SHORT))
        await gate.reached.wait()
        await published(gea, num_tokens)
        await gea.kill("generation-1")
        held = HeldReads(gea, monkeypatch)
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT))
        await held.reached.wait()  # it has claimed
        await gea.kill("generation-2")
        held.release()
        await gea.start(Pool.GENERATION, "generation-3", FakeEngine(SCRIPT))
        heard = await asking
        assert (heard.texts[0], heard.num_resets) == (TEXT, 0)
        check_end(heard.end, NUM_TOKENS)
        check_once(gea, {0: NUM_TOKENS})


async def test_a_follower_that_dies_while_it_claims_is_followed_in_turn() -> None:
    gate = Gate(stop_at=7)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=gate))
        asking = asyncio.create_task(ask(client, **SHORT))
        await published(gea, 7)
        await gea.kill("generation-1")
        starting = asyncio.create_task(gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT)))
        await gea.broker.until(lambda: any(record.kind is Kind.CLAIM for record in gea.tokens_of("r-1")))
        await starting
        await gea.kill("generation-2")
        await gea.start(Pool.GENERATION, "generation-3", FakeEngine(SCRIPT))
        heard = await asking
        assert (heard.texts[0], heard.num_resets) == (TEXT, 0)
        check_end(heard.end, NUM_TOKENS)


async def test_a_paused_owner_that_wakes_up_changes_nothing_for_a_reader() -> None:
    gate = Gate(stop_at=8)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=gate))
        asking = asyncio.create_task(ask(client, **SHORT))
        await gate.reached.wait()
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
        assert (heard.texts[0], heard.num_resets) == (TEXT, 0)
        check_end(heard.end, NUM_TOKENS)
        assert [record.kind for record in gea.tokens_of("r-1")].count(Kind.END) == 2
        assert sum(len(record.token_ids) for record in deltas_that_count(gea)) == NUM_TOKENS


# The prompt of the run that began.


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
    [OtherWeights("something else"), Forgetful("something else"), Forgetful("é")],
    ids=["other weights", "other tokens", "an early end"],
)
async def test_a_text_that_cannot_be_continued_is_voided_and_begun_anew(follower: FakeEngine) -> None:
    script = follower._script
    async with installation() as gea, gea.client() as client:
        await check_begun_anew(gea, client, type(follower)(script), script(None, 0))  # type: ignore[arg-type]


async def test_a_text_of_which_only_the_beginning_comes_again_is_voided_and_begun_anew() -> None:
    gate = Gate(stop_at=7)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=gate))
        asking = asyncio.create_task(ask(client, **SHORT))
        await published(gea, 7)
        await gea.kill("generation-1")
        await gea.start(Pool.GENERATION, "generation-2", Brief(SCRIPT))
        heard = await asking
        assert (heard.texts[0], heard.num_resets, len(heard.token_ids[0])) == ("é", 1, 2)
        assert heard.end is not None
        assert (heard.end.status, heard.end.usage.completion_tokens) == (EndStatus.INCOMPLETE, 2)


async def test_a_text_of_another_release_is_voided_and_begun_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(stop_at=7)
    async with installation() as gea, gea.client() as client:
        await start_path(gea, FakeEngine(SCRIPT, pause=gate))
        asking = asyncio.create_task(ask(client, **SHORT))
        await gate.reached.wait()
        await published(gea, 7)
        await gea.kill("generation-1")
        monkeypatch.setattr(planners, "TEMPLATE", planners.TEMPLATE.replace("im_start", "im_begin"))
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(SCRIPT))
        heard = await asking
        assert (heard.texts[0], heard.num_resets) == (TEXT, 1)
        check_end(heard.end, NUM_TOKENS)


# Strategies that publish text of their own, and hold the engine's back.

ADDED = "Shoes can be returned within 30 days. They can be returned, shoes, within days. Nobody knows the moon."
QUESTION = "How many days do I have to return shoes?"


async def undisturbed() -> Heard:
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(ADDED))
        return await ask(client, QUESTION)


@pytest.mark.parametrize("num_drawn", [0, 1, 20, 40, 60, 80])
async def test_a_quotation_and_what_the_model_adds_go_on_as_they_were_planned(num_drawn: int) -> None:
    whole = await undisturbed()
    assert whole.end is not None
    assert (whole.end.strategy, len(whole.end.citations) > 0) == ("knowledge", True)
    gate = Gate(stop_at=num_drawn)
    async with installation() as gea, gea.client() as client:
        await gea.start_all(FakeEngine(ADDED, pause=gate))
        asking = asyncio.create_task(ask(client, QUESTION))
        await published(gea, len(PASSAGE.text))
        await until_gate_or_end(gate, asking)
        await gea.kill("generation-1")
        await gea.start(Pool.GENERATION, "generation-2", FakeEngine(ADDED))
        heard = await asking
        assert (heard.texts, heard.num_resets, heard.token_ids) == (whole.texts, 0, whole.token_ids)
        assert heard.end is not None
        assert (heard.end.citations, heard.end.usage) == (whole.end.citations, whole.end.usage)
        assert heard.end.finish_reason == whole.end.finish_reason
        check_once(gea, {0: len(whole.token_ids[0])})


async def until_gate_or_end(gate: Gate, asking: asyncio.Task[Heard]) -> None:
    reaching = asyncio.create_task(gate.reached.wait())
    await asyncio.wait((reaching, asking), return_when=asyncio.FIRST_COMPLETED)
    reaching.cancel()
