"""Puts the generation pool together from the settings: the in-process engine, the planner, the stage."""

from __future__ import annotations

from pathlib import Path

from streams.broker import Broker
from streams.session import SessionStore
from workers.connect import writer_limits
from workers.generation.engine import Engine, Precision
from workers.generation.engine.loader import LocalEngineSettings
from workers.generation.engine.local import LocalEngine
from workers.generation.planning import Planner, load_hints
from workers.generation.prompt import Prompter
from workers.generation.stage import GenerationHandler, GenerationLimits
from workers.generation.strategies import GenerationDefaults, TemplateBook
from workers.outbox import Outbox
from workers.settings import Settings


def build_generation(
    settings: Settings,
    broker: Broker,
    outbox: Outbox,
    sessions: SessionStore,
    *,
    model: Path,
    templates: Path,
    intents: Path,
    topic: str,
) -> GenerationHandler:
    """Return the handler of the generation pool; nothing is loaded yet. Raises ConfigError."""
    generation, resources = settings.generation, settings.resources.generation_service
    engine = LocalEngine(
        model,
        LocalEngineSettings(
            max_sequences=generation.max_sequences,
            max_context=generation.max_context,
            precision=Precision(generation.precision),
            device="auto" if resources.gpu_count else "cpu",
            num_threads=resources.cpu_limit,
        ),
    )

    def load_prompter(started: Engine) -> Prompter:
        return Prompter.load(model, started.tokenizer, max_context=started.identity.max_context)

    planner = Planner(
        load_prompter,
        templates=TemplateBook.load(templates),
        hints=load_hints(intents),
        defaults=GenerationDefaults(
            max_length=generation.max_length,
            temperature=generation.temperature,
            top_p=generation.top_p,
            repetition_penalty=generation.repetition_penalty,
        ),
        small_model=generation.small_model,
    )
    limits = GenerationLimits(writer=writer_limits(settings), num_turns=settings.session.turns)
    return GenerationHandler(engine, planner, sessions, broker, outbox, topic=topic, limits=limits)
