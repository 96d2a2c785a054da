"""Which strategy answers a request, and why. Pure: values in, a choice out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.intent import IntentResult
from schemas.request import GenerationRequest, Retrieval, Strategy
from schemas.retrieval import Passage

OUT_OF_SCOPE = "out_of_scope"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterThresholds:
    """`min_confidence`: below it an intent is not believed. `min_semantic`: a hit below it that no keyword found either
    is a neighbour in an empty region, not an answer (cosine similarity of MiniLM; unrelated texts lie around 0.1).
    `min_semantic_refused`: the same for an intent that is out of scope for sure, where keywords prove nothing. Of the
    demo's 168 utterances that are out of scope none comes so near (at most 0.59, "reset my Netflix password"); of its
    two questions that are refused wrongly one does."""

    min_confidence: float = 0.4
    min_semantic: float = 0.3
    min_semantic_refused: float = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingSignals:
    """What the choice rests on. `hint` is the strategy that suits the intent, `has_template` whether it has a text."""

    request: GenerationRequest
    intent: IntentResult | None = None
    passages: Sequence[Passage] = ()
    language: str = "en"
    hint: Strategy | None = None
    has_template: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """A strategy and the reason for people."""

    strategy: Strategy
    reason: str


def choose(signals: RoutingSignals, thresholds: RouterThresholds = RouterThresholds()) -> Choice:
    """Return the strategy: what the request fixes, else what it brings along, else what intent and hits suggest."""
    request = signals.request
    if request.strategy is not None:
        return Choice(strategy=request.strategy, reason="fixed by the request")
    if request.passages:
        return Choice(strategy=Strategy.KNOWLEDGE, reason=f"the request brings {len(request.passages)} passages")
    if request.retrieval is Retrieval.ON:
        return Choice(strategy=Strategy.KNOWLEDGE, reason="the request asks for retrieval")
    return _by_intent(signals, thresholds)


def _by_intent(signals: RoutingSignals, thresholds: RouterThresholds) -> Choice:
    name, confidence = _intent(signals.intent)
    told = f"intent {name} ({confidence:.2f})"
    is_believed = name != OUT_OF_SCOPE and confidence >= thresholds.min_confidence
    has_template = signals.has_template and not signals.request.has_form  # a prepared text has no form
    if is_believed and has_template and signals.hint in (None, Strategy.TEMPLATE):
        return Choice(strategy=Strategy.TEMPLATE, reason=f"{told} has a prepared answer")
    if is_believed and signals.hint in (Strategy.DIALOGUE, Strategy.CONTINUATION):
        return Choice(strategy=signals.hint, reason=f"{told} suits it")
    is_refused = name == OUT_OF_SCOPE and confidence >= thresholds.min_confidence
    if signals.passages and (strength := _strength(signals.passages, thresholds, is_refused=is_refused)):
        return Choice(strategy=Strategy.KNOWLEDGE, reason=f"{told}, {strength}")
    if is_believed and signals.intent is not None and signals.intent.needs_retrieval:
        if signals.request.retrieval is not Retrieval.OFF:
            return Choice(strategy=Strategy.KNOWLEDGE, reason=f"{told} needs the knowledge base, which has no hit")
        return Choice(strategy=Strategy.DIALOGUE, reason=f"{told}, and the request switches retrieval off")
    if has_template and signals.language != "en":
        return Choice(strategy=Strategy.TEMPLATE, reason=f"{told}; the model does not speak {signals.language}")
    return Choice(strategy=Strategy.DIALOGUE, reason=f"{told}, no passage that fits")


def _intent(intent: IntentResult | None) -> tuple[str, float]:
    if intent is None or intent.failure:
        return "unknown", 0.0
    return intent.intent, intent.confidence


def _strength(passages: Sequence[Passage], thresholds: RouterThresholds, *, is_refused: bool) -> str:
    """Say why the best passages count as hits, empty if they don't."""
    semantic = max(passage.semantic_score for passage in passages)
    if semantic >= (thresholds.min_semantic_refused if is_refused else thresholds.min_semantic):
        return f"{len(passages)} passages, the nearest at {semantic:.2f}"
    if not is_refused and any(passage.keyword_rank == 1 for passage in passages):
        return f"{len(passages)} passages, found by keywords"
    return ""
