"""Puts a pool's handler together from the settings: the only place that knows every stage."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Protocol, TypeAlias

from schemas.errors import ConfigError
from schemas.worker import Pool
from streams.broker import Broker
from streams.cancellations import Cancellations
from streams.directory import Directory
from streams.session import SessionLimits, SessionStore
from streams.store import RedisStore
from streams.topics import DOCUMENTS, TOKENS, pool_topic
from workers.annotating import AnnotatingHandler
from workers.connect import store_settings
from workers.handler import Handler
from workers.outbox import Outbox
from workers.placement import Placement
from workers.router.admission import DoorLimits
from workers.router.placement import LeastLoad, PartitionCounts, RoundRobin, Workers
from workers.router.retry_mover import RetryMover
from workers.router.stage import RouterHandler
from workers.router.waiting_room import RoomLimits
from workers.settings import EngineKind, PlacementKind, Settings

HEAVY_MODULES = {
    Pool.ROUTER: (),
    Pool.INTENT: ("workers.intent.stage",),
    Pool.RETRIEVAL: ("workers.retrieval.stage",),
    Pool.GENERATION: ("workers.generation.assemble", "workers.generation.engine.local"),
}
FAKE_MODULES = ("workers.generation.assemble", "workers.generation.engine.script")


class HandlerBuilder(Protocol):
    """Makes the handler of a pool: `build_handler`, or another one for a bench."""

    async def __call__(
        self,
        pool: Pool,
        settings: Settings,
        broker: Broker,
        outbox: Outbox,
        stack: AsyncExitStack,
        *,
        colour: str,
        cancellations: Cancellations,
    ) -> Handler: ...


Loader: TypeAlias = Callable[[Pool, Settings], None]


def preload(pool: Pool, settings: Settings) -> None:
    """Import what a pool needs; takes seconds for torch, so it runs beside the wait for Kafka."""
    is_fake = pool is Pool.GENERATION and settings.generation.engine is EngineKind.FAKE
    for name in FAKE_MODULES if is_fake else HEAVY_MODULES[pool]:
        importlib.import_module(name)


def build_placement(settings: Settings, broker: Broker, workers: Workers, stack: AsyncExitStack) -> Placement:
    """Make what chooses partitions for a worker that hands requests on; it needs no worker to be known."""
    counts = PartitionCounts(broker)
    stack.push_async_callback(counts.close)
    match settings.router.placement:
        case PlacementKind.ROUND_ROBIN:
            return RoundRobin(workers, counts.get)
        case PlacementKind.LEAST_LOAD:
            return LeastLoad(workers, counts.get, max_length=settings.generation.max_length)


async def build_handler(
    pool: Pool,
    settings: Settings,
    broker: Broker,
    outbox: Outbox,
    stack: AsyncExitStack,
    *,
    colour: str,
    cancellations: Cancellations,
) -> Handler:
    """Make the handler of a pool; what it holds open is closed by `stack`. Raises ConfigError."""
    match pool:
        case Pool.ROUTER:
            return await _router(settings, broker, outbox, stack, cancellations)
        case Pool.INTENT:
            return _intent(settings, outbox, cancellations)
        case Pool.RETRIEVAL:
            return _retrieval(settings, broker, outbox, cancellations)
        case Pool.GENERATION:
            return await _generation(settings, broker, outbox, stack, colour, cancellations)


async def _router(
    settings: Settings, broker: Broker, outbox: Outbox, stack: AsyncExitStack, cancellations: Cancellations
) -> Handler:
    num_partitions = {TOKENS: outbox.num_token_partitions}
    for topic in settings.router.reply_topics:
        if not topic.startswith(f"{TOKENS}."):
            raise ConfigError(f"router.reply_topics: {topic!r} is not allowed: names that begin with {TOKENS}.")
        num_partitions[topic] = await broker.partitions(topic)
        if not num_partitions[topic]:
            raise ConfigError(f"router.reply_topics: there is no topic {topic!r}")
    limits = DoorLimits(
        max_length=settings.generation.max_length,
        max_request_bytes=settings.router.max_request_bytes,
        max_queue_depth=settings.router.max_queue_depth,
        deadline_ms=int(settings.router.deadline_s * 1000),
        max_deadline_ms=int(settings.router.max_deadline_s * 1000),
        num_token_partitions=num_partitions,
    )
    mover = RetryMover(
        broker,
        outbox,
        member=outbox.worker_id,
        max_in_flight=settings.retry.max_in_flight,
        cancellations=cancellations,
    )
    return RouterHandler(
        broker,
        outbox,
        await _sessions(settings, stack),
        Directory(broker),
        limits=limits,
        mover=mover,
        cancellations=cancellations,
        room_limits=RoomLimits(
            max_waiting=settings.router.max_waiting,
            tenant_share=settings.router.tenant_share,
            max_tokens_per_worker=settings.router.max_tokens_in_flight_per_worker,
        ),
    )


def _intent(settings: Settings, outbox: Outbox, cancellations: Cancellations) -> Handler:
    from workers.intent.stage import IntentStage

    stage = IntentStage(
        _path("intent.encoder", settings.intent.encoder),
        Path(settings.intent.head) if settings.intent.head else None,
        intents=_path("intent.intents", settings.intent.intents),
        threads=settings.resources.intent_service.cpu_limit,
    )
    return AnnotatingHandler(stage, outbox, cancellations=cancellations)


def _retrieval(settings: Settings, broker: Broker, outbox: Outbox, cancellations: Cancellations) -> Handler:
    from workers.retrieval.stage import RetrievalStage

    stage = RetrievalStage(
        broker,
        topic=DOCUMENTS,
        encoder_folder=_path("retrieval.encoder", settings.retrieval.encoder),
        num_passages=settings.retrieval.num_passages,
        threads=settings.resources.retrieval_service.cpu_limit,
    )
    return AnnotatingHandler(stage, outbox, cancellations=cancellations)


async def _generation(
    settings: Settings,
    broker: Broker,
    outbox: Outbox,
    stack: AsyncExitStack,
    colour: str,
    cancellations: Cancellations,
) -> Handler:
    from workers.generation.assemble import build_generation

    return build_generation(
        settings,
        broker,
        outbox,
        await _sessions(settings, stack),
        model=Path(settings.generation.model) if settings.generation.model else None,
        templates=_path("generation.templates", settings.generation.templates),
        intents=_path("intent.intents", settings.intent.intents),
        topic=pool_topic(Pool.GENERATION, colour),
        cancellations=cancellations,
    )


async def _sessions(settings: Settings, stack: AsyncExitStack) -> SessionStore:
    store = await stack.enter_async_context(RedisStore(store_settings(settings.redis)))
    limits = SessionLimits(
        turns_ttl_s=settings.session.ttl_s, pin_ttl_s=settings.session.ttl_s, marker_ttl_s=settings.router.marker_ttl_s
    )
    return SessionStore(store, limits)


def _path(key: str, value: str | None) -> Path:
    """Return a setting that `gea worker` fills in where the file leaves it open. Raises ConfigError."""
    if value is None:
        raise ConfigError(f"{key}: is not set; `gea worker` and `gea up` set it to what ships with GEA")
    return Path(value)
