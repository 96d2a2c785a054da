"""Which requests have been cancelled, whose readers are there, and who is told the moment one is over.

Knows requests by id and tenant, not where the news comes from (`streams.control_follower` feeds it). One event loop.
The invariant: memory is bounded by `max_ids` and `max_age_s`, whatever is cancelled; a cancel that comes before its
request holds for `max_age_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

from schemas.errors import RequestCancelledError
from streams.expiring import ExpiringMap
from streams.leases import LeaseWatch
from streams.settings import check_range

Key = tuple[str, str]  # request_id, tenant

log = structlog.get_logger(__name__)

MAX_AGE_S = 3_600.0
MAX_IDS = 100_000  # about 20 MB; a cancel that is pushed out has been overtaken by so many younger ones


class Cancellations:
    """The cancelled requests. An id counts only together with the tenant that cancelled it.

    `max_age_s`: the longest that a request may live. `clock` counts seconds, from anywhere.
    """

    def __init__(
        self,
        *,
        max_age_s: float = MAX_AGE_S,
        max_ids: int = MAX_IDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_range("cancellations.max_ids", max_ids, 1, 10_000_000)
        self.max_age_s = max_age_s
        self.leases = LeaseWatch(self._lapse, max_ids=max_ids, clock=clock)
        self._reasons: ExpiringMap[Key, str] = ExpiringMap(max_age_s=max_age_s, max_items=max_ids, clock=clock)
        self._watched: dict[Key, set[asyncio.Event]] = {}

    def cancel(self, request_id: str, tenant: str, reason: str = "") -> None:
        """Note that a request is cancelled, and tell whoever works on it. The first reason stays. Idempotent."""
        key = (request_id, tenant)
        self._reasons.put(key, self._reasons.get(key, reason))
        for event in self._watched.get(key, ()):
            event.set()

    def is_cancelled(self, request_id: str, tenant: str) -> bool:
        """Return whether the request was cancelled."""
        return (request_id, tenant) in self._reasons

    def reason(self, request_id: str, tenant: str) -> str:
        """Return why it was cancelled, empty if it was not or nobody said."""
        return self._reasons.get((request_id, tenant), "")

    def error(self, request_id: str, tenant: str) -> RequestCancelledError:
        """Return the error that ends a cancelled request."""
        return RequestCancelledError(self.reason(request_id, tenant) or "cancelled on request")

    @contextmanager
    def watch(self, request_id: str, tenant: str, *, lease_s: float | None = None) -> Iterator[asyncio.Event]:
        """Give an event that is set once the request is cancelled; set already if it was.

        `lease_s`: it also counts as cancelled once no reader has said for so long that he is there.
        """
        key, event = (request_id, tenant), asyncio.Event()
        if self.is_cancelled(request_id, tenant):
            event.set()
        self._watched.setdefault(key, set()).add(event)
        try:
            with self.leases.hold(key, lease_s):
                yield event
        finally:
            self._watched[key].discard(event)
            if not self._watched[key]:
                del self._watched[key]

    def statistics(self) -> dict[str, int]:
        """Return how much is remembered and watched."""
        return {"cancelled": len(self._reasons), "watched": len(self._watched), **self.leases.statistics()}

    def _lapse(self, key: Key) -> None:
        log.info("reader_gone", request_id=key[0], tenant=key[1])
        self.cancel(*key, "reader is gone")
