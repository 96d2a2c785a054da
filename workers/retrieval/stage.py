"""The retrieval pool's stage: adds passages to requests, and keeps its index in step with the topic of documents.

A request that brings its own passages keeps them; one that wants none gets none. A question that nothing fits gets an
empty result, not an error.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from schemas.envelope import RoutedRequest
from schemas.errors import GeaError, InternalError
from schemas.request import Retrieval
from schemas.retrieval import RetrievalResult
from schemas.worker import Pool
from streams.broker import Broker
from streams.clock import now_ms
from workers.encoder import Encoder
from workers.retrieval.follower import DocumentFollower
from workers.retrieval.given import given_passages
from workers.retrieval.knowledge import KnowledgeBase, Query
from workers.retrieval.ranking import RankingSettings
from workers.stage import StageSnapshot

NUM_PASSAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class _Running:
    """What lives from `start` to `stop`."""

    encoder: Encoder
    knowledge: KnowledgeBase
    follower: DocumentFollower
    following: asyncio.Task[None]


class RetrievalStage:
    """An `Annotator`. The broker is the caller's; the encoder is loaded at `start` with `threads` threads."""

    def __init__(
        self,
        broker: Broker,
        *,
        topic: str,
        encoder_folder: Path,
        num_passages: int = NUM_PASSAGES,
        threads: int | None = None,
        ranking: RankingSettings | None = None,
    ) -> None:
        self._broker = broker
        self._topic = topic
        self._encoder_folder = encoder_folder
        self._num_passages = num_passages
        self._threads = threads
        self._ranking = ranking or RankingSettings()
        self._running: _Running | None = None
        self._num_queued = 0
        self._step_ms = 0.0
        self._last_step_ms = 0

    @property
    def pool(self) -> Pool:
        """Return the pool that this stage works in."""
        return Pool.RETRIEVAL

    @property
    def index_version(self) -> int:
        """Return how many document records the index has applied."""
        return self._running.follower.num_applied if self._running else 0

    @property
    def num_broken_documents(self) -> int:
        """Return how many records of the topic were no documents."""
        return self._running.follower.num_broken if self._running else 0

    async def until_index_version(self, version: int) -> None:
        """Wait until the index has applied that many records. Raises InternalError if the stage is not started."""
        if self._running is None:
            raise InternalError("retrieval: not started, or stopped")
        await self._running.follower.until_applied(version)

    async def start(self) -> None:
        """Load and warm, read the topic of documents to its present end and follow it from then on."""
        encoder = await asyncio.to_thread(Encoder, self._encoder_folder, threads=self._threads)
        knowledge = KnowledgeBase(encoder, self._ranking)
        follower = DocumentFollower(self._broker, self._topic, knowledge)
        try:
            await knowledge.warm()
            await follower.catch_up()
        except BaseException:
            await follower.close()
            knowledge.close()
            encoder.close()
            raise
        following = asyncio.create_task(follower.follow(), name="documents")
        self._running = _Running(encoder=encoder, knowledge=knowledge, follower=follower, following=following)

    async def annotate(self, batch: Sequence[RoutedRequest]) -> Sequence[RoutedRequest]:
        """Return the requests in the same order with their passages; all questions are encoded at once."""
        if self._running is None:
            raise InternalError("retrieval: not started, or stopped")
        started = time.perf_counter()
        version = self.index_version
        asking = [place for place, routed in enumerate(batch) if wants_passages(routed)]
        self._num_queued += len(asking)
        try:
            found = await self._running.knowledge.search([self._query(batch[place]) for place in asking])
        finally:
            self._num_queued -= len(asking)
        took_ms = (time.perf_counter() - started) * 1000
        self._step_ms, self._last_step_ms = took_ms, now_ms()
        passages = {place: given_passages(routed.request) for place, routed in enumerate(batch)}
        passages.update(zip(asking, found, strict=True))
        return [
            _with(routed, RetrievalResult(passages=passages[place], index_version=version, took_ms=round(took_ms, 3)))
            for place, routed in enumerate(batch)
        ]

    def give_up(self, routed: RoutedRequest, error: Exception) -> RoutedRequest:
        """Return the request without passages but those it brought, and why."""
        code = error.code if isinstance(error, GeaError) else InternalError.code
        return _with(routed, RetrievalResult(passages=given_passages(routed.request), failure=code))

    def snapshot(self) -> StageSnapshot:
        """Return what the stage tells about itself."""
        return StageSnapshot(
            model=self._running.encoder.identity if self._running else "",
            num_queued=self._num_queued,
            step_ms=round(self._step_ms, 3),
            last_step_ms=self._last_step_ms,
        )

    async def stop(self) -> None:
        """Stop following and free the indexes. Idempotent."""
        running, self._running = self._running, None
        if running is None:
            return
        running.following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running.following
        await running.follower.close()
        running.knowledge.close()
        running.encoder.close()

    def _query(self, routed: RoutedRequest) -> Query:
        request = routed.request
        return Query(
            text=request.last_user_text(),
            tenant=routed.tenant,
            num_passages=request.num_passages or self._num_passages,
        )


def wants_passages(routed: RoutedRequest) -> bool:
    """Return whether passages are to be looked up: not if the request brought its own, else as it says."""
    if routed.request.passages is not None or routed.request.retrieval is Retrieval.OFF:
        return False
    if routed.request.retrieval is Retrieval.ON or routed.intent is None:
        return True
    return routed.intent.needs_retrieval


def _with(routed: RoutedRequest, result: RetrievalResult) -> RoutedRequest:
    return msgspec.structs.replace(routed, retrieval=result)
