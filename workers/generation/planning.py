"""From a routed request to a plan: which strategy, why, and what it makes of the request.

Tokenizing takes milliseconds per kilobyte, so plans are made in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import yaml

from schemas.envelope import RoutedRequest
from schemas.errors import ConfigError, InvalidRequestError
from schemas.request import Strategy
from workers.generation.answer import passages_of
from workers.generation.engine import Engine
from workers.generation.prompt import Prompter
from workers.generation.strategies import (
    ConversationTurn,
    GenerationDefaults,
    Plan,
    RoutingSignals,
    StrategyContext,
    StrategyRegistry,
    TemplateBook,
    build_registry,
    choose,
)
from workers.intent.language import resolve_language


class Planner:
    """Plans answers for one engine. `hints` is the strategy that suits an intent; `load` makes the prompter."""

    def __init__(
        self,
        load: Callable[[Engine], Prompter],
        *,
        templates: TemplateBook,
        hints: Mapping[str, Strategy],
        defaults: GenerationDefaults,
        small_model: bool = True,
    ) -> None:
        self._load = load
        self._templates = templates
        self._hints = hints
        self._defaults = defaults
        self._registry: StrategyRegistry = build_registry(templates, small_model=small_model)
        self._prompter: Prompter | None = None

    async def start(self, engine: Engine) -> None:
        """Load the prompter for a started engine. Raises ConfigError."""
        self._prompter = await asyncio.to_thread(self._load, engine)

    async def plan(self, routed: RoutedRequest, turns: Sequence[ConversationTurn]) -> tuple[Plan, str]:
        """Return the plan and the reason for its strategy. Equal requests and turns have equal plans.

        Raises PromptTooLongError, and InvalidRequestError for a strategy that is not known here or a conversation that
        the model's chat template refuses.
        """
        assert self._prompter is not None, "start() comes first"
        context = self._context(routed, turns, self._prompter)
        choice = choose(self._signals(context))
        strategy = self._registry.get(choice.strategy)
        try:
            return await asyncio.to_thread(strategy.plan, context), choice.reason
        except ConfigError as error:  # it rendered others: what is wrong is in this conversation
            raise InvalidRequestError(f"messages: {error.message}", field="messages") from error

    def _context(self, routed: RoutedRequest, turns: Sequence[ConversationTurn], prompter: Prompter) -> StrategyContext:
        request = routed.request
        found = routed.intent.language if routed.intent else None
        return StrategyContext(
            request=request,
            prompter=prompter,
            intent=routed.intent,
            passages=passages_of(routed),
            history=tuple(turns),
            language=resolve_language(request.language or found, request.last_user_text()),
            seed=routed.seed,
            defaults=self._defaults,
        )

    def _signals(self, context: StrategyContext) -> RoutingSignals:
        intent = context.intent.intent if context.intent else ""
        return RoutingSignals(
            request=context.request,
            intent=context.intent,
            passages=context.passages,
            language=context.language,
            hint=self._hints.get(intent),
            has_template=self._templates.find(intent, context.language) is not None,
        )


def fingerprint(plan: Plan) -> str:
    """Return a hash of all that shapes the text of a plan, the same in every process: equal plans go on alike."""
    sampling = plan.sampling
    shaping = {
        "strategy": plan.strategy,
        "sampling": replace(sampling, logit_bias={}, stop_token_ids=frozenset()),
        "logit_bias": sorted(sampling.logit_bias.items()),
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "pieces": plan.pieces,
        "prompt": plan.prompt,
        "passages": plan.passages,
        "is_gated": plan.may_publish is not None,
    }
    return hashlib.sha256(msgspec.msgpack.encode(shaping)).hexdigest()


def load_hints(path: Path) -> dict[str, Strategy]:
    """Read the strategy that suits each intent from YAML: `intent: {strategy_hint: knowledge, …}`.

    Raises ConfigError that names the file and the intent.
    """
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"intent.intents: {path}: {error}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"intent.intents: {path}: a map of intents is expected")
    return {str(intent): _hint(path, intent, described) for intent, described in found.items()}


def _hint(path: Path, intent: object, described: object) -> Strategy:
    hint = described.get("strategy_hint") if isinstance(described, dict) else None
    if hint not in list(Strategy):
        raise ConfigError(f"intent.intents: {path}: {intent}.strategy_hint: {', '.join(Strategy)} are allowed")
    return Strategy(hint)
