"""Plans of the strategies, and what readers see when the engine that follows a script plays one."""

from __future__ import annotations

from dataclasses import dataclass

from schemas.intent import IntentResult
from schemas.request import GenerationRequest, Strategy
from schemas.retrieval import Passage
from tests.workers.generation.fakes import byte_prompter
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.protocol import Finished, TokenChunk
from workers.generation.engine.scripted_choice import Script
from workers.generation.strategies import (
    GenerationDefaults,
    Plan,
    StrategyContext,
    TemplateBook,
    build_registry,
    play,
)

SHOES = Passage(
    passage_id="shoes",
    title="Returning shoes",
    text="You have 30 days to return shoes. Put the shoes back into their box. The warehouse is in Ohio.",
)
CHINESE = Passage(passage_id="zh", title="退货", text="鞋类商品自签收之日起30天内可以退货。请把鞋放回原鞋盒。")
QUESTION = "How many days do I have to return shoes?"
QUOTE = "You have 30 days to return shoes."
BOOK = TemplateBook(texts={"greeting": {"en": "Hello!", "zh": "您好！"}})


@dataclass(frozen=True)
class Turn:
    user: str
    assistant: str


def plan_of(
    strategy: Strategy,
    request: GenerationRequest,
    *,
    small_model: bool = True,
    passages: tuple[Passage, ...] = (),
    history: tuple[Turn, ...] = (),
    language: str = "en",
    intent: str = "greeting",
    max_context: int = 4_096,
) -> Plan:
    context = StrategyContext(
        request=request,
        prompter=byte_prompter(max_context),
        passages=passages,
        history=history,
        language=language,
        intent=IntentResult(intent=intent, confidence=1.0),
        seed=7,
        defaults=GenerationDefaults(),
    )
    return build_registry(BOOK, small_model=small_model).get(strategy).plan(context)


async def run(plan: Plan, script: str | Script = "") -> tuple[dict[int, str], Finished, FakeEngine]:
    engine = FakeEngine(script)
    await engine.start()
    texts: dict[int, str] = {}
    num_tokens, finished = 0, None
    async for event in play(engine, plan, "r"):
        assert finished is None
        if isinstance(event, TokenChunk):
            texts[event.index] = texts.get(event.index, "") + event.text
            num_tokens += len(event.token_ids)
        else:
            finished = event
    assert finished is not None
    assert finished.usage.completion_tokens == num_tokens == sum(end.num_tokens for end in finished.choices)
    await engine.stop()
    return texts, finished, engine


def ask(prompt: str = QUESTION, **fields: object) -> GenerationRequest:
    return GenerationRequest(prompt=prompt, **fields)  # type: ignore[arg-type]
