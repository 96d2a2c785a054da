"""A plan that is carried out a second time says the same again, whatever of it was published before."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from schemas.errors import InvalidRequestError
from schemas.request import Strategy
from schemas.tokens import FinishReason
from tests.workers.generation.strategies.played import CHINESE, QUOTE, SHOES, ask, plan_of
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE, ByteTokenizer
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.protocol import ChoiceEnd, EngineRequest, Finished
from workers.generation.engine.scripted_choice import Script
from workers.generation.strategies import Plan, play

ADDED = " Put the shoes back into their box. 30 days are 14 days. The end."
ACCEPTED = " Put the shoes back into their box."


@dataclass
class Played:
    """What was published, by choice, and how it ended."""

    token_ids: list[tuple[int, ...]]
    texts: list[str]
    ends: tuple[ChoiceEnd, ...] = ()
    usage: tuple[int, int] = (0, 0)


async def played(engine: FakeEngine, plan: Plan, output: Sequence[Sequence[int]] = ()) -> Played:
    n = plan.sampling.n
    found = Played([()] * n, [""] * n)
    async for event in play(engine, plan, "r", output):
        if isinstance(event, Finished):
            found.ends, found.usage = event.choices, (event.usage.prompt_tokens, event.usage.completion_tokens)
        else:
            found.token_ids[event.index] += event.token_ids
            found.texts[event.index] += event.text
    assert found.usage[1] == sum(map(len, found.token_ids))
    return found


async def started(script: str | Script) -> FakeEngine:
    engine = FakeEngine(script)
    await engine.start()
    return engine


def by_index(request: EngineRequest, index: int) -> str:
    return (ADDED, " The warehouse is in Ohio.", " You cannot return shoes.")[index % 3]


KNOWLEDGE = plan_of(Strategy.KNOWLEDGE, ask(), passages=(SHOES,))
PLANS: dict[str, tuple[Plan, str | Script]] = {
    "free": (plan_of(Strategy.DIALOGUE, ask()), "Fine 🌶️ 你好 é👨‍👩‍👧."),
    "free_stop": (plan_of(Strategy.DIALOGUE, ask(stop=("i 👨", "好 é"))), "Hi 🌶️ 你好 é👨‍👩‍👧."),
    "free_length": (plan_of(Strategy.DIALOGUE, ask(max_tokens=11)), "Hi 🌶️ 你好"),
    "added": (KNOWLEDGE, ADDED),
    "quoted": (plan_of(Strategy.KNOWLEDGE, ask("鞋子几天内可以退货？"), passages=(CHINESE,), language="zh"), ""),
    "refused": (KNOWLEDGE, " You cannot return shoes."),
    "unfinished": (KNOWLEDGE, " Put the shoes back into"),
    "without_end": (KNOWLEDGE, ACCEPTED + " x" * 400),
    "stop_over_the_border": (plan_of(Strategy.KNOWLEDGE, ask(stop=("shoes. Put",)), passages=(SHOES,)), ADDED),
    "stop_in_the_pieces": (plan_of(Strategy.KNOWLEDGE, ask(stop=("30",)), passages=(SHOES,)), ADDED),
    "cut_in_the_pieces": (plan_of(Strategy.KNOWLEDGE, ask(max_tokens=9), passages=(SHOES,)), ADDED),
    "cut_behind_the_pieces": (plan_of(Strategy.KNOWLEDGE, ask(max_tokens=60), passages=(SHOES,)), ADDED),
    "cut_at_the_border": (plan_of(Strategy.KNOWLEDGE, ask(max_tokens=len(QUOTE)), passages=(SHOES,)), ADDED),
    "template": (plan_of(Strategy.TEMPLATE, ask(), language="zh"), ""),
    "choices": (plan_of(Strategy.KNOWLEDGE, ask(n=3), passages=(SHOES,)), by_index),
    "free_choices": (plan_of(Strategy.DIALOGUE, ask(n=3, stop=("Ohio",))), by_index),
}


@pytest.mark.parametrize("name", PLANS)
async def test_a_plan_goes_on_from_whatever_was_published(name: str) -> None:
    plan, script = PLANS[name]
    engine = await started(script)
    whole = await played(engine, plan)
    for cut in range(max(map(len, whole.token_ids)) + 1):
        output = [ids[: cut + 7 * index] for index, ids in enumerate(whole.token_ids)]
        assert await played(engine, plan, output) == whole
    await engine.stop()


async def test_the_plans_say_what_they_are_for() -> None:
    found = {}
    for name, (plan, script) in PLANS.items():
        engine = await started(script)
        found[name] = await played(engine, plan)
        await engine.stop()
    assert found["added"].texts == [QUOTE + ACCEPTED]
    assert found["refused"].texts[0].rstrip() == QUOTE
    assert found["stop_over_the_border"].ends[0].stop_reason == "shoes. Put"
    assert found["free_stop"].ends[0].stop_reason == "好 é"
    assert found["cut_in_the_pieces"].ends[0].finish_reason is FinishReason.LENGTH
    assert len(set(found["choices"].texts)) == len(set(found["free_choices"].texts)) == 3


async def test_the_engine_is_given_what_lies_beyond_the_pieces() -> None:
    engine, pieces = await started(ADDED), tuple(QUOTE.encode())
    for published, given in (
        ((*pieces, *b" Put"), tuple(b" Put")),
        (pieces, ()),
        (pieces[:-1], ()),
        ((), ()),
        (tuple(b"Something else."), ()),
        ((*b"y", *pieces[1:], *b" Put"), ()),
    ):
        await played(engine, KNOWLEDGE, (published,))
        assert engine.requests[-1].output == (given,)
        assert engine.requests[-1].sampling == engine.requests[0].sampling
    await engine.stop()


async def test_output_that_another_plan_published_gives_this_plans_own_stream() -> None:
    engine = await started(ADDED)
    whole = await played(engine, KNOWLEDGE)
    assert await played(engine, KNOWLEDGE, (tuple(b"Hello!"),)) == whole
    assert await played(engine, KNOWLEDGE, (tuple(b"Hello!"), (1, 2), (3,))) == whole
    await engine.stop()


async def test_tokens_that_the_engine_does_not_know_are_refused() -> None:
    engine = await started("Fine.")
    with pytest.raises(InvalidRequestError, match="output"):
        await played(engine, plan_of(Strategy.DIALOGUE, ask()), ((70_000,),))
    await engine.stop()


async def test_answer_that_was_published_whole_ends_again_as_it_did() -> None:
    engine = await started("Fine.")
    plan = plan_of(Strategy.DIALOGUE, ask())
    whole = await played(engine, plan)
    assert whole.token_ids == [(*b"Fine.", END_OF_SEQUENCE)]
    num_steps = engine.statistics().num_steps
    assert await played(engine, plan, whole.token_ids) == whole
    assert engine.statistics().num_steps == num_steps
    assert ByteTokenizer().decode(whole.token_ids[0]) == whole.texts[0]
    await engine.stop()
