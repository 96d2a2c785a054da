from __future__ import annotations

import pytest

from schemas.intent import IntentResult
from schemas.request import GenerationRequest, Retrieval, Strategy
from schemas.retrieval import Passage
from workers.generation.strategies.router import RoutingSignals, choose

ASK = GenerationRequest(prompt="x")
NEAR = (Passage(text="a", semantic_score=0.6), Passage(text="b", semantic_score=0.2))
NEARISH = (Passage(text="a", semantic_score=0.55, keyword_rank=1),)
FAR = (Passage(text="a", semantic_score=0.1, keyword_rank=3),)
BY_KEYWORD = (Passage(text="a", semantic_score=0.1, keyword_rank=1),)


def intent(name: str = "shipping", confidence: float = 0.9, needs_retrieval: bool = True) -> IntentResult:
    return IntentResult(intent=name, confidence=confidence, needs_retrieval=needs_retrieval)


FIXED = GenerationRequest(prompt="x", strategy=Strategy.CONTINUATION)
CONTINUE = intent("continue_text", needs_retrieval=False)
GREETING = intent("greeting", needs_retrieval=False)


@pytest.mark.parametrize(
    ("signals", "expected"),
    [
        (RoutingSignals(request=FIXED, passages=NEAR), "continuation"),
        (RoutingSignals(request=GenerationRequest(prompt="x", passages=(Passage(text="a"),))), "knowledge"),
        (RoutingSignals(request=GenerationRequest(prompt="x", retrieval=Retrieval.ON)), "knowledge"),
        (RoutingSignals(request=ASK, intent=intent(), passages=NEAR, hint=Strategy.KNOWLEDGE), "knowledge"),
        (RoutingSignals(request=ASK, intent=intent(), passages=BY_KEYWORD), "knowledge"),
        (RoutingSignals(request=ASK, intent=intent(), passages=FAR), "knowledge"),  # says that nothing was found
        (RoutingSignals(request=GenerationRequest(prompt="x", retrieval=Retrieval.OFF), intent=intent()), "dialogue"),
        (RoutingSignals(request=ASK, intent=GREETING, hint=Strategy.TEMPLATE, has_template=True), "template"),
        (RoutingSignals(request=ASK, intent=GREETING, hint=Strategy.TEMPLATE), "dialogue"),
        (RoutingSignals(request=ASK, intent=CONTINUE, hint=Strategy.CONTINUATION), "continuation"),
        (RoutingSignals(request=ASK, intent=intent("greeting", 0.2), has_template=True, passages=NEAR), "knowledge"),
        (RoutingSignals(request=ASK, intent=intent("out_of_scope", 0.9), passages=FAR), "dialogue"),
        (RoutingSignals(request=ASK, intent=intent("out_of_scope", 0.9), passages=NEAR), "knowledge"),
        (RoutingSignals(request=ASK, intent=intent("out_of_scope", 0.9), passages=NEARISH), "dialogue"),
        (RoutingSignals(request=ASK, intent=intent("out_of_scope", 0.9), passages=BY_KEYWORD), "dialogue"),
        (RoutingSignals(request=ASK, intent=intent("out_of_scope", 0.2), passages=NEARISH), "knowledge"),
        (RoutingSignals(request=ASK, intent=intent("out_of_scope"), language="zh", has_template=True), "template"),
        (RoutingSignals(request=ASK), "dialogue"),
        (RoutingSignals(request=ASK, intent=IntentResult(intent="shipping", confidence=0.9, failure="x")), "dialogue"),
    ],
)  # fmt: skip
def test_choice_follows_request_intent_and_hits(signals: RoutingSignals, expected: str) -> None:
    choice = choose(signals)
    assert choice.strategy == expected
    assert choice.reason


def test_reason_names_what_it_rests_on() -> None:
    choice = choose(RoutingSignals(request=ASK, intent=intent(), passages=NEAR))
    assert choice.reason == "intent shipping (0.90), 2 passages, the nearest at 0.60"
