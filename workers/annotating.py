"""Runs an annotator (intent, retrieval): decode → annotate → forward → acknowledge.

A batch that fails is tried request by request; a request that fails alone goes on without the annotation, so that the
person still gets an answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import structlog

from schemas.envelope import RoutedRequest
from schemas.errors import InvalidRequestError
from schemas.worker import Pool
from streams.delivery import Delivery
from workers.handler import decode_batch, refusal_epoch
from workers.outbox import Outbox
from workers.stage import Annotator, StageSnapshot

log = structlog.get_logger(__name__)


class AnnotatingHandler:
    """A `Handler` around an `Annotator`."""

    def __init__(self, annotator: Annotator, outbox: Outbox) -> None:
        self._annotator = annotator
        self._outbox = outbox

    @property
    def pool(self) -> Pool:
        """Return the pool of the annotator."""
        return self._annotator.pool

    async def start(self) -> None:
        """Load and warm the annotator."""
        await self._annotator.start()

    async def handle(self, batch: Sequence[Delivery]) -> None:
        """Annotate and forward a batch."""
        decoded = await decode_batch(self._outbox, batch)
        if not decoded:
            return
        annotated = await self._annotate([routed for _, routed in decoded])
        await asyncio.gather(
            *(
                self._forward(delivery, before, after)
                for (delivery, before), after in zip(decoded, annotated, strict=True)
            )
        )

    def snapshot(self) -> StageSnapshot:
        """Return what the annotator tells about itself."""
        return self._annotator.snapshot()

    async def stop(self) -> None:
        """Stop the annotator."""
        await self._annotator.stop()

    async def _forward(self, delivery: Delivery, before: RoutedRequest, after: RoutedRequest) -> None:
        """Hand a request on; without the annotation if it is too large with it, and else it ends here."""
        try:
            try:
                await self._outbox.forward(after)
            except InvalidRequestError as error:
                log.warning("annotation_dropped", request_id=before.request_id, reason=error.message)
                await self._outbox.forward(self._annotator.give_up(before, error))
        except InvalidRequestError as error:
            epoch = refusal_epoch(delivery)
            await self._outbox.end(before.reply, before.request_id, error, epoch=epoch)
        delivery.done()

    async def _annotate(self, batch: Sequence[RoutedRequest]) -> Sequence[RoutedRequest]:
        try:
            return await self._annotator.annotate(batch)
        except Exception as error:
            log.exception("annotation_failed", pool=self.pool, num_requests=len(batch))
            if len(batch) == 1:
                return [self._annotator.give_up(batch[0], error)]
        return [(await self._annotate([routed]))[0] for routed in batch]
