"""Which requests have been cancelled, and who is told the moment one is.

Knows requests by id and tenant, not where the news comes from (`streams.control` feeds it). One event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager


class Cancellations:
    """The cancelled requests. An id counts only together with the tenant that cancelled it."""

    def __init__(self) -> None:
        self._reasons: dict[tuple[str, str], str] = {}
        self._watched: dict[tuple[str, str], set[asyncio.Event]] = {}

    def cancel(self, request_id: str, tenant: str, reason: str = "") -> None:
        """Note that a request is cancelled, and tell whoever works on it. Idempotent."""
        self._reasons.setdefault((request_id, tenant), reason)
        for event in self._watched.get((request_id, tenant), ()):
            event.set()

    def is_cancelled(self, request_id: str, tenant: str) -> bool:
        """Return whether the request was cancelled."""
        return (request_id, tenant) in self._reasons

    def reason(self, request_id: str, tenant: str) -> str:
        """Return why it was cancelled, empty if it was not or nobody said."""
        return self._reasons.get((request_id, tenant), "")

    @contextmanager
    def watch(self, request_id: str, tenant: str) -> Iterator[asyncio.Event]:
        """Give an event that is set once the request is cancelled; set already if it was."""
        key, event = (request_id, tenant), asyncio.Event()
        if self.is_cancelled(request_id, tenant):
            event.set()
        self._watched.setdefault(key, set()).add(event)
        try:
            yield event
        finally:
            self._watched[key].discard(event)
            if not self._watched[key]:
                del self._watched[key]
