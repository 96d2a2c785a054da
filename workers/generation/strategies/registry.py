"""All strategies that this deployment knows, by name."""

from __future__ import annotations

from collections.abc import Iterable

from schemas.errors import InvalidRequestError
from schemas.request import Strategy
from workers.generation.strategies.continuation import ContinuationStrategy
from workers.generation.strategies.dialogue import DialogueStrategy
from workers.generation.strategies.knowledge import KnowledgeStrategy
from workers.generation.strategies.plan import GenerationStrategy
from workers.generation.strategies.template import TemplateBook, TemplateStrategy


class StrategyRegistry:
    """Looks strategies up; a later one of the same name replaces an earlier one."""

    def __init__(self, strategies: Iterable[GenerationStrategy]) -> None:
        self._strategies = {strategy.name: strategy for strategy in strategies}

    @property
    def names(self) -> frozenset[Strategy]:
        """Return the names of all strategies."""
        return frozenset(self._strategies)

    def get(self, name: Strategy) -> GenerationStrategy:
        """Return a strategy. Raises InvalidRequestError if this deployment has none of that name."""
        strategy = self._strategies.get(name)
        if strategy is None:
            known = ", ".join(sorted(self._strategies))
            raise InvalidRequestError(f"strategy: {name} is not known here: {known}", field="strategy")
        return strategy


def build_registry(templates: TemplateBook, *, small_model: bool = True) -> StrategyRegistry:
    """Return the four strategies of this version.

    `small_model` gives a model that needs them its crutches: knowledge answers begin with a quotation, and free
    text stays close to the likeliest words.
    """
    return StrategyRegistry(
        (
            KnowledgeStrategy(quotes=small_model),
            DialogueStrategy(is_careful=small_model),
            ContinuationStrategy(is_careful=small_model),
            TemplateStrategy(templates),
        )
    )
