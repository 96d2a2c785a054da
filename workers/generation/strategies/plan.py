"""What a strategy is given and what it returns: values only.

Knows no engine and does nothing itself; `play` carries a plan out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from schemas.intent import IntentResult
from schemas.request import GenerationRequest, Strategy
from schemas.response_format import ChoiceFormat, JsonObjectFormat, JsonSchemaFormat, RegexFormat, ResponseFormat
from schemas.retrieval import Passage
from schemas.tokens import Citation
from workers.generation.engine.protocol import ConstraintKind, ConstraintSpec, SamplingParams
from workers.generation.prompt import Prompter
from workers.generation.strategies.citation import cite

CAREFUL_TEMPERATURE = 0.3
CAREFUL_PENALTY = 1.05
CAREFUL_TOKENS = 160  # about ten sentences; what goes on longer has lost its thread


class ConversationTurn(Protocol):
    """One question and its answer, earlier in the session."""

    @property
    def user(self) -> str:
        """Return what the person said."""
        ...

    @property
    def assistant(self) -> str:
        """Return what was answered."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationDefaults:
    """The deployment's values for what a request leaves open. `max_length` is also the upper bound of `max_tokens`."""

    max_length: int = 512
    temperature: float = 0.7
    top_p: float = 0.9
    repetition_penalty: float = 1.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StrategyContext:
    """All that a strategy may look at. `history` is oldest first, `passages` best first."""

    request: GenerationRequest
    prompter: Prompter
    intent: IntentResult | None = None
    passages: tuple[Passage, ...] = ()
    history: tuple[ConversationTurn, ...] = ()
    language: str = "en"
    seed: int = 0
    defaults: GenerationDefaults = GenerationDefaults()

    @property
    def max_tokens(self) -> int:
        """Return how many tokens the answer may have."""
        return min(self.request.max_tokens or self.defaults.max_length, self.defaults.max_length)


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedPiece:
    """Text that is published as it stands, with the tokens that it counts for."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How one answer is made: the pieces first, then what the engine makes of `prompt` (None: nothing).

    `may_publish` is asked for every finished sentence of the engine; the first one that it refuses ends the answer.
    `sampling.max_tokens` and `sampling.stop` cover the whole answer, the pieces included.
    """

    strategy: Strategy
    sampling: SamplingParams
    pieces: tuple[FixedPiece, ...] = ()
    prompt: tuple[int, ...] | None = None
    passages: tuple[Passage, ...] = ()
    prompt_text: str = ""
    may_publish: Callable[[str], bool] | None = field(default=None, compare=False)

    def cite(self, text: str, index: int = 0) -> tuple[Citation, ...]:
        """Return which of the plan's passages supports which sentence of the answer."""
        return cite(text, self.passages, index=index)


class GenerationStrategy(Protocol):
    """One way of making an answer."""

    @property
    def name(self) -> Strategy:
        """Return the strategy's name in requests and end records."""
        ...

    def plan(self, context: StrategyContext) -> Plan:
        """Return the plan of one answer. Tokenizes: keep it off the event loop. Raises PromptTooLongError."""
        ...


def sampling_for(
    context: StrategyContext,
    *,
    temperature: float | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
) -> SamplingParams:
    """Return the request's sampling fields; what it leaves open is the strategy's, else the deployment's.

    An answer with a form has no repetition penalty by itself: it would drive the model away from the words and signs
    that the form repeats.
    """
    request, defaults = context.request, context.defaults
    if request.has_form:
        repetition_penalty = 1.0
    return SamplingParams(
        max_tokens=context.max_tokens,
        temperature=_first(request.temperature, temperature, defaults.temperature),
        top_p=_first(request.top_p, top_p, defaults.top_p),
        top_k=request.top_k or 0,
        min_p=request.min_p or 0.0,
        repetition_penalty=_first(request.repetition_penalty, repetition_penalty, defaults.repetition_penalty),
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        logit_bias=_bias(request.logit_bias or {}),
        seed=context.seed if request.seed is None else request.seed,
        stop=request.stop or (),
        stop_token_ids=frozenset(request.stop_token_ids or ()),
        logprobs=request.logprobs,
        n=request.n or 1,
        constraint=constraint_for(request.response_format),
    )


def constraint_for(form: ResponseFormat | None) -> ConstraintSpec | None:
    """Return a form as the engine takes it; None for any text."""
    match form:
        case JsonObjectFormat():
            return ConstraintSpec(kind=ConstraintKind.JSON_OBJECT)
        case JsonSchemaFormat(json_schema=schema):
            return ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, value=schema.text())
        case RegexFormat(pattern=pattern):
            return ConstraintSpec(kind=ConstraintKind.REGEX, value=pattern)
        case ChoiceFormat(choices=choices):
            return ConstraintSpec(kind=ConstraintKind.CHOICE, value=json.dumps(choices, ensure_ascii=False))
        case _:
            return None


def careful_sampling_for(context: StrategyContext) -> SamplingParams:
    """Return the sampling of free text by a small model; what the request says itself holds.

    At temperature 0.7 and repetition penalty 1.2, which suit a large model, SmolLM2-135M does not find its end and
    falls into strings of rare words, because the penalty has by then pushed every common one down. At 0.3 and 1.05 it
    answers in a sentence or two and stops.
    """
    sampling = sampling_for(
        context,
        temperature=min(context.defaults.temperature, CAREFUL_TEMPERATURE),
        repetition_penalty=min(context.defaults.repetition_penalty, CAREFUL_PENALTY),
    )
    if context.request.max_tokens or context.request.has_form:  # what is cut has not its form
        return sampling
    return replace(sampling, max_tokens=min(sampling.max_tokens, CAREFUL_TOKENS))


def fixed(context: StrategyContext, *texts: str) -> tuple[FixedPiece, ...]:
    """Return texts as pieces."""
    return tuple(FixedPiece(text=text, token_ids=context.prompter.tokenizer.encode(text)) for text in texts if text)


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _bias(bias: Mapping[str, float]) -> dict[int, float]:
    return {int(token_id): value for token_id, value in bias.items()}
