"""Stand-ins for the intent and retrieval pools: the same result for every request, at once, without a model.

The bench measures delivery, not understanding: these pools then cost nothing but their hop through Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack

import msgspec

from schemas.envelope import RoutedRequest
from schemas.intent import IntentResult
from schemas.retrieval import Passage, RetrievalResult
from schemas.worker import Pool
from streams.broker import Broker
from streams.cancellations import Cancellations
from workers.annotating import AnnotatingHandler
from workers.build import build_handler
from workers.handler import Handler
from workers.outbox import Outbox
from workers.settings import Settings
from workers.stage import StageSnapshot

PASSAGE = Passage(
    text="Shoes can be returned within 30 days of delivery. Keep your receipt.",
    passage_id="returns-shoes",
    title="Returns",
    score=1.0,
)


STAND_INS = (Pool.INTENT, Pool.RETRIEVAL)


async def build_or_stand_in(
    pool: Pool,
    settings: Settings,
    broker: Broker,
    outbox: Outbox,
    stack: AsyncExitStack,
    *,
    colour: str,
    cancellations: Cancellations,
) -> Handler:
    """Make the handler of a pool as a worker does, or that of its stand-in."""
    if pool in STAND_INS:
        return AnnotatingHandler(FixedAnnotator(pool), outbox, cancellations=cancellations)
    return await build_handler(pool, settings, broker, outbox, stack, colour=colour, cancellations=cancellations)


class FixedAnnotator:
    """An annotator that says the same of every request."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool

    @property
    def pool(self) -> Pool:
        """Return the pool that it stands in for."""
        return self._pool

    async def start(self) -> None:
        """Be ready."""

    async def annotate(self, batch: Sequence[RoutedRequest]) -> Sequence[RoutedRequest]:
        """Return the requests with the result of this pool."""
        return [annotated(routed, self._pool) for routed in batch]

    def give_up(self, routed: RoutedRequest, error: Exception) -> RoutedRequest:
        """Return the request with the same result: there is nothing that could fail."""
        return annotated(routed, self._pool)

    def snapshot(self) -> StageSnapshot:
        """Return an idle stage."""
        return StageSnapshot(model="fixed")

    async def stop(self) -> None:
        """Free nothing."""


def annotated(routed: RoutedRequest, pool: Pool) -> RoutedRequest:
    """Return a request with what a pool says of every one."""
    if pool is Pool.INTENT:
        found = IntentResult(intent="return_refund", confidence=0.9, needs_retrieval=True)
        return msgspec.structs.replace(routed, intent=found)
    return msgspec.structs.replace(routed, retrieval=RetrievalResult(passages=(PASSAGE,)))
