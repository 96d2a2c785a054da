"""What readers see of each strategy, on the engine that follows a script."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from schemas.errors import ConfigError, EngineUnavailableError, InvalidRequestError, PromptTooLongError
from schemas.request import GenerationRequest, Message, Role, Strategy
from schemas.tokens import FinishReason
from tests.workers.generation.strategies.played import QUESTION, SHOES, Turn, ask, plan_of, run
from workers.generation.engine.byte_tokenizer import ByteTokenizer
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.protocol import Finished
from workers.generation.strategies import (
    StrategyRegistry,
    TemplateBook,
    play,
)


async def test_template_speaks_the_language_and_falls_back_to_english() -> None:
    for language, expected in (("en", "Hello!"), ("zh", "您好！"), ("fr", "Hello!")):
        texts, finished, _ = await run(plan_of(Strategy.TEMPLATE, ask(), language=language))
        assert texts[0] == expected
        assert finished.choices[0].finish_reason is FinishReason.STOP


@pytest.mark.parametrize(("max_tokens", "expected"), [(3, "您"), (4, "您"), (6, "您好"), (9, "您好！")])
async def test_max_tokens_cuts_fixed_text_between_characters(max_tokens: int, expected: str) -> None:
    texts, finished, _ = await run(plan_of(Strategy.TEMPLATE, ask(max_tokens=max_tokens), language="zh"))
    assert texts[0] == expected
    reason = FinishReason.STOP if expected == "您好！" else FinishReason.LENGTH
    assert finished.choices[0].finish_reason is reason


async def test_stop_string_counts_in_fixed_text_and_over_its_border() -> None:
    texts, finished, _ = await run(plan_of(Strategy.TEMPLATE, ask(stop=("lo",))))
    assert (texts[0], finished.choices[0].stop_reason) == ("Hel", "lo")
    plan = plan_of(Strategy.KNOWLEDGE, ask(stop=("shoes. Put",)), passages=(SHOES,))
    texts, finished, _ = await run(plan, " Put the shoes back into their box.")
    assert (texts[0], finished.choices[0].stop_reason) == ("You have 30 days to return ", "shoes. Put")


async def test_every_choice_of_fixed_text_is_told() -> None:
    texts, finished, _ = await run(plan_of(Strategy.TEMPLATE, ask(n=3)))
    assert texts == {0: "Hello!", 1: "Hello!", 2: "Hello!"}
    assert [end.index for end in finished.choices] == [0, 1, 2]


async def test_dialogue_shows_the_model_what_was_said_before() -> None:
    request = GenerationRequest(
        messages=(
            Message(role=Role.SYSTEM, content="Be brief."),
            Message(role=Role.USER, content="sent question"),
            Message(role=Role.ASSISTANT, content="sent answer"),
            Message(role=Role.USER, content="And now?"),
        )
    )
    plan = plan_of(Strategy.DIALOGUE, request, history=(Turn("first", "reply"),))
    assert plan.prompt is not None
    shown = ByteTokenizer().decode(plan.prompt)
    assert shown.split("\n") == [
        "system", "Be brief.", "user", "first", "assistant", "reply", "user", "sent question",
        "assistant", "sent answer", "user", "And now?", "assistant", "",
    ]  # fmt: skip
    texts, _, _ = await run(plan, "Fine.")
    assert texts[0] == "Fine."


async def test_dialogue_leaves_out_the_oldest_turns() -> None:
    history = (Turn("oldest " * 40, "reply " * 40), Turn("newer", "reply"))
    plan = plan_of(Strategy.DIALOGUE, ask(max_tokens=10), history=history, max_context=400)
    assert plan.prompt is not None
    shown = ByteTokenizer().decode(plan.prompt)
    assert "newer" in shown and "oldest" not in shown and QUESTION in shown


async def test_continuation_is_the_text_alone() -> None:
    plan = plan_of(Strategy.CONTINUATION, ask("Once upon <|im_end|>"))
    assert plan.prompt == tuple(b"Once upon <|im_end|>")
    with pytest.raises(PromptTooLongError):
        plan_of(Strategy.CONTINUATION, ask("x" * 500), max_context=400)


def test_sampling_is_the_requests_then_the_deployments() -> None:
    request = ask(temperature=0.1, top_k=5, logit_bias={"7": 1.5}, stop_token_ids=(3,), max_tokens=100_000)
    sampling = plan_of(Strategy.DIALOGUE, request, small_model=False).sampling
    assert (sampling.temperature, sampling.top_p, sampling.repetition_penalty) == (0.1, 0.9, 1.2)
    assert (sampling.top_k, sampling.logit_bias, sampling.stop_token_ids) == (5, {7: 1.5}, frozenset({3}))
    assert (sampling.max_tokens, sampling.seed) == (512, 7)


async def test_abort_of_a_played_plan_is_told_as_abort() -> None:
    engine = FakeEngine("x" * 100)
    await engine.start()
    reasons = []
    async for event in play(engine, plan_of(Strategy.DIALOGUE, ask()), "r"):
        engine.abort("r")
        if isinstance(event, Finished):
            reasons.append(event.choices[0].finish_reason)
    assert reasons == [FinishReason.ABORT]
    await engine.stop()


async def test_engine_that_refuses_is_heard_before_anything_is_published() -> None:
    engine, events = FakeEngine(""), []
    with pytest.raises(EngineUnavailableError):
        async for event in play(engine, plan_of(Strategy.KNOWLEDGE, ask(), passages=(SHOES,)), "r"):
            events.append(event)
    assert not events


def test_unknown_strategy_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="strategy"):
        StrategyRegistry(()).get(Strategy.DIALOGUE)


def test_template_file_is_read_and_checked(tmp_path: Path) -> None:
    path = tmp_path / "templates.yaml"
    path.write_text("shop: {en: Alder}\nanswers: {greeting: {en: 'Welcome to {shop}!'}}\n")
    assert TemplateBook.load(path).find("greeting", "en") == "Welcome to Alder!"
    assert TemplateBook.load(path).find("greeting", "zh") is None
    for broken in ("answers: 3", "answers: {greeting: {en: 3}}", "[", "shop: 3\nanswers: {}"):
        path.write_text(broken)
        with pytest.raises(ConfigError, match="templates"):
            TemplateBook.load(path)


def test_plans_compare_by_what_they_say() -> None:
    plan = plan_of(Strategy.TEMPLATE, ask())
    assert plan == replace(plan, may_publish=lambda sentence: True)


async def test_conversation_of_256_messages_in_any_order_is_answered() -> None:
    roles = (Role.ASSISTANT, Role.ASSISTANT, Role.SYSTEM, Role.USER)
    messages = tuple(Message(role=roles[place % 4], content=f"m{place} " * 50) for place in range(256))
    plan = plan_of(Strategy.DIALOGUE, GenerationRequest(messages=messages), max_context=16_000)
    assert plan.prompt is not None
    assert "m255" in ByteTokenizer().decode(plan.prompt)


@pytest.mark.parametrize("strategy", [Strategy.DIALOGUE, Strategy.CONTINUATION])
def test_a_small_model_is_kept_on_a_short_rein_unless_the_request_says_otherwise(strategy: Strategy) -> None:
    careful = plan_of(strategy, ask()).sampling
    assert (careful.temperature, careful.repetition_penalty, careful.max_tokens) == (0.3, 1.05, 160)
    free = plan_of(strategy, ask(), small_model=False).sampling
    assert (free.temperature, free.repetition_penalty, free.max_tokens) == (0.7, 1.2, 512)
    asked = plan_of(strategy, ask(temperature=1.5, repetition_penalty=1.3, max_tokens=400)).sampling
    assert (asked.temperature, asked.repetition_penalty, asked.max_tokens) == (1.5, 1.3, 400)
