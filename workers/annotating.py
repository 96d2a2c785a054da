"""Runs an annotator (intent, retrieval): decode → annotate → forward → acknowledge.

A batch that fails is tried request by request; a request that fails alone, or waits for half of the time that it has
left, goes on without the annotation, so that the person still gets an answer. One that nobody waits for any more ends
at once, whatever its batch does.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

import structlog

from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.errors import DeadlineExceededError, InvalidRequestError, RequestCancelledError, UnavailableError
from schemas.request import GenerationRequest
from schemas.worker import Pool
from streams.cancellations import Cancellations
from streams.clock import now_ms
from streams.delivery import Delivery
from streams.racing import end_tasks
from streams.telemetry import bind_request
from streams.topics import TOKENS
from workers.handler import decode_batch, end_early, handle_each
from workers.outbox import Outbox
from workers.stage import Annotator, StageSnapshot
from workers.wanted import seconds_left, while_wanted

PROBE_DEADLINE_MS = 60_000
PATIENCE = 0.5  # share of a request's time that one stage may take before the others do without it

Annotating = asyncio.Task[Sequence[RoutedRequest]]

log = structlog.get_logger(__name__)


class AnnotatingHandler:
    """A `Handler` around an `Annotator`."""

    def __init__(self, annotator: Annotator, outbox: Outbox, *, cancellations: Cancellations | None = None) -> None:
        self._annotator = annotator
        self._outbox = outbox
        self._cancellations = cancellations or Cancellations()

    @property
    def pool(self) -> Pool:
        """Return the pool of the annotator."""
        return self._annotator.pool

    async def start(self) -> None:
        """Load and warm the annotator."""
        await self._annotator.start()

    async def handle(self, batch: Sequence[Delivery]) -> None:
        """Annotate and forward a batch."""
        decoded = await decode_batch(self._outbox, batch, self._cancellations)
        if not decoded:
            return
        requests = [routed for _, routed in decoded]
        annotating = asyncio.create_task(self._annotate(requests))
        try:
            await handle_each(
                (delivery, self._finish(delivery, routed, annotating, place))
                for place, (delivery, routed) in enumerate(decoded)
            )
        finally:  # an annotation that nobody waits for any more is given up
            await end_tasks(annotating)

    def snapshot(self) -> StageSnapshot:
        """Return what the annotator tells about itself."""
        return self._annotator.snapshot()

    async def probe(self) -> float | None:
        """Annotate one small request and return the time it took."""
        began_s = time.perf_counter()
        await self._annotator.annotate([_probe_request()])
        return (time.perf_counter() - began_s) * 1000

    async def stop(self) -> None:
        """Stop the annotator."""
        await self._annotator.stop()

    async def _finish(self, delivery: Delivery, before: RoutedRequest, annotating: Annotating, place: int) -> None:
        """Bring one request of a batch on its way, or to its end."""
        with bind_request(before.request_id, traceparent=before.traceparent):
            try:
                after = await self._annotated(before, annotating, place)
                if _has_given_up(after, self.pool):
                    delivery.fail()
                await self._forward(before, after)
            except (RequestCancelledError, DeadlineExceededError, InvalidRequestError) as error:
                await end_early(self._outbox, delivery, before, error)
            else:
                delivery.done()

    async def _annotated(self, before: RoutedRequest, annotating: Annotating, place: int) -> RoutedRequest:
        timeout_s = PATIENCE * seconds_left(before)
        try:
            return (await while_wanted(annotating, before, self._cancellations, timeout_s=timeout_s))[place]
        except TimeoutError as late:
            log.warning("annotation_late", pool=self.pool, waited_s=round(timeout_s, 3))
            return self._annotator.give_up(before, UnavailableError(f"{self.pool}: {late}"))

    async def _forward(self, before: RoutedRequest, after: RoutedRequest) -> None:
        """Hand a request on; without the annotation if it is too large with it.

        Raises InvalidRequestError if it is too large without it too.
        """
        try:
            await self._outbox.forward(after)
        except InvalidRequestError as error:
            log.warning("annotation_dropped", request_id=before.request_id, reason=error.message)
            await self._outbox.forward(self._annotator.give_up(before, error))

    async def _annotate(self, batch: Sequence[RoutedRequest]) -> Sequence[RoutedRequest]:
        try:
            return await self._annotator.annotate(batch)
        except Exception as error:
            log.exception("annotation_failed", pool=self.pool, num_requests=len(batch))
            if len(batch) == 1:
                return [self._annotator.give_up(batch[0], error)]
        return [(await self._annotate([routed]))[0] for routed in batch]


def _has_given_up(routed: RoutedRequest, pool: Pool) -> bool:
    result = routed.intent if pool is Pool.INTENT else routed.retrieval
    return result is not None and bool(result.failure)


def _probe_request() -> RoutedRequest:
    now = now_ms()
    return RoutedRequest(
        request_id="probe",
        request=GenerationRequest(prompt="How many days do I have to return shoes?"),
        reply=Reply(topic=TOKENS, partition=0),
        origin=Origin(partition=0, offset=0),
        seed=0,
        received_ms=now,
        deadline_ms=now + PROBE_DEADLINE_MS,
    )
