"""A request whose answer must have a form: who writes it, and that nothing else stands in it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from schemas.codec import convert
from schemas.intent import IntentResult
from schemas.request import GenerationRequest, Strategy
from schemas.retrieval import Passage
from tests.workers.generation.strategies.played import CHINESE, QUESTION, SHOES, plan_of
from workers.generation.engine.protocol import ConstraintKind, ConstraintSpec
from workers.generation.strategies.plan import CAREFUL_TOKENS
from workers.generation.strategies.router import RoutingSignals, choose

SCHEMA = {"type": "object", "properties": {"days": {"type": "integer"}}}
FORM = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def ask(form: dict[str, Any] | None = None, **fields: Any) -> GenerationRequest:
    return convert({"prompt": QUESTION, "response_format": form or FORM, **fields}, GenerationRequest)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, ConstraintSpec(kind=ConstraintKind.JSON_OBJECT)),
        (FORM, ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, value=json.dumps(SCHEMA, separators=(",", ":")))),
        ({"type": "regex", "pattern": "a+"}, ConstraintSpec(kind=ConstraintKind.REGEX, value="a+")),
        ({"type": "choice", "choices": ["é", "b"]}, ConstraintSpec(kind=ConstraintKind.CHOICE, value='["é", "b"]')),
    ],
)
@pytest.mark.parametrize("strategy", [Strategy.KNOWLEDGE, Strategy.DIALOGUE, Strategy.CONTINUATION])
def test_form_reaches_the_engine_from_every_strategy(
    strategy: Strategy, form: dict[str, Any], expected: ConstraintSpec | None
) -> None:
    assert plan_of(strategy, ask(form), passages=(SHOES,)).sampling.constraint == expected


@pytest.mark.parametrize("passages", [(), (SHOES,), (CHINESE,)])
@pytest.mark.parametrize("small_model", [True, False])
@pytest.mark.parametrize("language", ["en", "zh"])
def test_knowledge_answer_with_a_form_is_the_models_alone(
    passages: tuple[Passage, ...], small_model: bool, language: str
) -> None:
    plan = plan_of(Strategy.KNOWLEDGE, ask(), passages=passages, small_model=small_model, language=language)
    assert plan.pieces == ()
    assert plan.may_publish is None
    assert plan.prompt is not None
    assert QUESTION in plan.prompt_text
    assert all(passage.text in plan.prompt_text for passage in passages)


def test_answer_with_a_form_is_not_cut_short_and_has_no_penalty_of_its_own() -> None:
    sampling = plan_of(Strategy.DIALOGUE, ask()).sampling
    assert sampling.max_tokens > CAREFUL_TOKENS
    assert sampling.repetition_penalty == 1.0
    assert plan_of(Strategy.DIALOGUE, ask(repetition_penalty=1.3, max_tokens=9)).sampling.repetition_penalty == 1.3
    assert plan_of(Strategy.DIALOGUE, ask({"type": "text"})).sampling.repetition_penalty > 1.0


@pytest.mark.parametrize(("language", "intent"), [("en", "greeting"), ("zh", "greeting"), ("zh", "out_of_scope")])
def test_prepared_answer_gives_way_to_the_model_where_a_form_is_asked_for(language: str, intent: str) -> None:
    found = IntentResult(intent=intent, confidence=0.9, needs_retrieval=False)
    for form, expected in (({"type": "text"}, Strategy.TEMPLATE), (FORM, Strategy.DIALOGUE)):
        signals = RoutingSignals(request=ask(form), intent=found, language=language, has_template=True)
        assert choose(signals).strategy is expected
