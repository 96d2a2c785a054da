"""Puts the generation pool together from the settings: engine, planner, stage. Only the local engine loads torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from schemas.errors import ConfigError
from streams.broker import Broker
from streams.cancellations import Cancellations
from streams.session import SessionStore
from workers.connect import writer_limits
from workers.generation.engine import Engine
from workers.generation.engine.pace import StepReport
from workers.generation.engine.settings import LocalEngineSettings
from workers.generation.engine_metrics import EngineMetrics
from workers.generation.planning import Planner, load_hints
from workers.generation.prompt import ChatTemplate, Prompter
from workers.generation.stage import GenerationHandler, GenerationLimits
from workers.generation.strategies import GenerationDefaults, TemplateBook
from workers.outbox import Outbox
from workers.settings import EngineKind, Settings

FAKE_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n"
)


def build_generation(
    settings: Settings,
    broker: Broker,
    outbox: Outbox,
    sessions: SessionStore,
    *,
    model: Path | None,
    templates: Path,
    intents: Path,
    topic: str,
    cancellations: Cancellations | None = None,
) -> GenerationHandler:
    """Return the handler of the generation pool; nothing is loaded yet. The fake engine needs no model folder.

    Raises ConfigError.
    """
    measured = EngineMetrics(outbox.metrics) if outbox.metrics is not None else None
    engine = build_engine(settings, model, on_step=measured.note_step if measured is not None else None)
    planner = build_planner(settings, model, templates=templates, intents=intents)
    limits = GenerationLimits(
        writer=writer_limits(settings), num_turns=settings.session.turns, max_attempts=settings.retry.max_attempts
    )
    return GenerationHandler(
        engine,
        planner,
        sessions,
        broker,
        outbox,
        topic=topic,
        limits=limits,
        cancellations=cancellations,
        engine_metrics=measured,
    )


def build_engine(
    settings: Settings, model: Path | None, *, on_step: Callable[[StepReport], None] | None = None
) -> Engine:
    """Return the engine of the configuration, not yet started. `on_step` hears of each step. Raises ConfigError."""
    generation = settings.generation
    if generation.engine is EngineKind.FAKE:
        return _fake_engine(generation.fake_pace_ms, generation.max_sequences, generation.max_context)
    from workers.generation.engine.local import LocalEngine  # with torch

    return LocalEngine(_given(model), local_settings(settings), on_step=on_step)


def local_settings(settings: Settings) -> LocalEngineSettings:
    """Return what the configuration says of the in-process engine."""
    generation, local = settings.generation, settings.generation.local
    resources = settings.resources.generation_service
    taken = {name: getattr(local, name) for name in local.__struct_fields__ if name not in ("device", "max_swap_mb")}
    return LocalEngineSettings(
        **taken,
        max_sequences=generation.max_sequences,
        max_context=generation.max_context,
        precision=generation.precision,
        device="cpu" if local.device == "auto" and not resources.gpu_count else local.device,
        num_threads=resources.cpu_limit,
        max_swap_bytes=local.max_swap_mb << 20,
        memory_limit_bytes=resources.mem_limit_bytes,
    )


def build_planner(settings: Settings, model: Path | None, *, templates: Path, intents: Path) -> Planner:
    """Return the planner of the configuration, not yet started. Raises ConfigError."""
    generation = settings.generation
    return Planner(
        _prompter_loader(generation.engine, model),
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


def _fake_engine(pace_ms: float, max_sequences: int, max_context: int) -> Engine:
    from workers.generation.engine.fake import FakeEngine, paced
    from workers.generation.engine.script import seeded_script

    return FakeEngine(
        seeded_script(),
        pause=paced(pace_ms),
        max_sequences=max_sequences,
        max_context=max_context,
    )


def _prompter_loader(kind: EngineKind, model: Path | None) -> Callable[[Engine], Prompter]:
    def with_fake_template(engine: Engine) -> Prompter:
        return Prompter(engine.tokenizer, ChatTemplate(FAKE_TEMPLATE, {}), max_context=engine.identity.max_context)

    def with_models_template(engine: Engine) -> Prompter:
        return Prompter.load(_given(model), engine.tokenizer, max_context=engine.identity.max_context)

    return with_fake_template if kind is EngineKind.FAKE else with_models_template


def _given(model: Path | None) -> Path:
    if model is None:
        raise ConfigError("generation.model: is not set; `gea worker` and `gea up` set it to what ships with GEA")
    return model
