"""Strategies: each turns a request with its findings into a plan, and `play` carries the plan out on an engine."""

from workers.generation.strategies.plan import (
    ConversationTurn,
    FixedPiece,
    GenerationDefaults,
    GenerationStrategy,
    Plan,
    StrategyContext,
)
from workers.generation.strategies.play import play
from workers.generation.strategies.registry import StrategyRegistry, build_registry
from workers.generation.strategies.router import Choice, RouterThresholds, RoutingSignals, choose
from workers.generation.strategies.template import TemplateBook

__all__ = [
    "Choice",
    "ConversationTurn",
    "FixedPiece",
    "GenerationDefaults",
    "GenerationStrategy",
    "Plan",
    "RouterThresholds",
    "RoutingSignals",
    "StrategyContext",
    "StrategyRegistry",
    "TemplateBook",
    "build_registry",
    "choose",
    "play",
]
