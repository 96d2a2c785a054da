"""What undisturbed runs of the bench's requests say: the same planner and engine, in this process, without Kafka.

The invariant: given a request, and what its prompt took from the session, the answer is the one of any worker that
nothing happens to.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from ops.bench.chaos.annotators import annotated
from ops.bench.chaos.checker import Expected, Memory
from ops.bench.chaos.load import Planned
from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.worker import Pool
from streams.session import Turn
from streams.topics import TOKENS
from workers.generation.assemble import build_engine, build_planner
from workers.generation.engine import Finished
from workers.generation.strategies import play
from workers.path import next_pool
from workers.settings import Settings


class Reference:
    """Answers requests one at a time; `async with` starts and stops its engine."""

    def __init__(self, settings: Settings) -> None:
        generation = msgspec.structs.replace(settings.generation, fake_pace_ms=0.0)
        settings = msgspec.structs.replace(settings, generation=generation)
        model = Path(generation.model) if generation.model else None
        assert generation.templates is not None, "the bench's configuration names them"
        assert settings.intent.intents is not None, "the bench's configuration names them"
        self._engine = build_engine(settings, model)
        self._planner = build_planner(
            settings, model, templates=Path(generation.templates), intents=Path(settings.intent.intents)
        )

    async def answer(self, planned: Planned, memory: Memory = ()) -> Expected:
        """Return the answer of a run whose prompt took `memory` from the session."""
        routed = routed_request(planned)
        turns = [Turn(request_id=str(n), user=user, assistant=said) for n, (user, said) in enumerate(memory)]
        plan, _ = await self._planner.plan(routed, turns)
        texts: dict[int, str] = {}
        token_ids: dict[int, tuple[int, ...]] = {}
        finished: Finished | None = None
        async for event in play(self._engine, plan, planned.request_id):
            if isinstance(event, Finished):
                finished = event
            else:
                texts[event.index] = texts.get(event.index, "") + event.text
                token_ids[event.index] = token_ids.get(event.index, ()) + event.token_ids
        assert finished is not None, "play() yields Finished last"
        indexes = [choice.index for choice in finished.choices]
        return Expected(
            texts=tuple(texts.get(index, "") for index in indexes),
            token_ids=tuple(token_ids.get(index, ()) for index in indexes),
            reasons=tuple(choice.finish_reason for choice in finished.choices),
            prompt_tokens=finished.usage.prompt_tokens,
        )

    async def __aenter__(self) -> Self:
        await self._engine.start()
        await self._planner.start(self._engine)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._engine.stop()


def routed_request(planned: Planned) -> RoutedRequest:
    """Return a request as it arrives at generation."""
    seed = planned.request.seed
    assert seed is not None, "the bench draws one for every request"
    routed = RoutedRequest(
        request_id=planned.request_id,
        request=planned.request,
        reply=Reply(topic=TOKENS, partition=0),
        origin=Origin(partition=0, offset=0),
        seed=seed,
        received_ms=0,
        deadline_ms=0,
    )
    while (pool := next_pool(routed)) is not Pool.GENERATION:
        routed = annotated(routed, pool)
    return routed
