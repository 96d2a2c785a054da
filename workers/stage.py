"""What a pool's stage is to the worker process that runs it.

Stages know models and indexes, not topics or offsets: the worker decodes, batches, forwards and commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from schemas.envelope import RoutedRequest
from schemas.worker import Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSnapshot:
    """What a stage tells about itself in the worker's status. `last_step_ms` is a Unix time, 0 before any step.

    `tokens_queued` estimates the tokens that are not decoded yet: of prompts, and up to `max_tokens` of each answer.
    `num_unbegun` counts the requests that a peer could begin with at once, since nothing of them is done here.
    `kv_usage` is the share of an engine's cache that running sequences hold. `owes_step`: work has come that the next
    step would take up. `failure` says why the stage cannot work any more.
    """

    model: str = ""
    tokens_in_flight: int = 0
    tokens_queued: int = 0
    num_queued: int = 0
    num_unbegun: int = 0
    step_ms: float = 0.0
    last_step_ms: int = 0
    kv_usage: float = 0.0
    owes_step: bool = False
    failure: str = ""


class Annotator(Protocol):
    """A stage that adds what it found to requests and passes them on (intent, retrieval)."""

    @property
    def pool(self) -> Pool:
        """Return the pool that this stage works in."""
        ...

    async def start(self) -> None:
        """Load and warm, off the event loop. Returns when the stage is ready for its first batch."""
        ...

    async def annotate(self, batch: Sequence[RoutedRequest]) -> Sequence[RoutedRequest]:
        """Return the requests in the same order, each with this stage's result.

        Raises any error for a batch that cannot be handled; the worker then tries its requests one by one.
        Several calls may run at once. Safe to cancel.
        """
        ...

    def give_up(self, routed: RoutedRequest, error: Exception) -> RoutedRequest:
        """Return the request with a result that says why there is none, so that it can go on without."""
        ...

    def snapshot(self) -> StageSnapshot:
        """Return what the stage tells about itself."""
        ...

    async def stop(self) -> None:
        """Free everything. Idempotent."""
        ...
