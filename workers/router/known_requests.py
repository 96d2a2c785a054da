"""Which requests have come before: by the markers that all routers share, and by what this one has seen itself.

A repeat has the key of its request and so comes to the same router: what that has seen counts where the store is away
or has forgotten. Knows ids and markers, not what is done about a repeat.
"""

from __future__ import annotations

from streams.expiring import ExpiringMap
from streams.session import Marker, SessionStore

MAX_SEEN = 50_000  # about 20 MiB
MAX_AGE_S = 3_600.0


class KnownRequests:
    """The requests that were let in and have not been refused since."""

    def __init__(self, sessions: SessionStore) -> None:
        self._sessions = sessions
        self._seen: ExpiringMap[str, Marker | None] = ExpiringMap(max_age_s=MAX_AGE_S, max_items=MAX_SEEN)

    async def mark(self, request_id: str, marker: Marker) -> Marker:
        """Remember a request unless it is known, and return the marker that counts: another origin means a repeat."""
        known = await self._sessions.mark(request_id, marker)
        if known.origin == marker.origin:
            known = self._seen.get(request_id, None) or known
        if known.origin == marker.origin:
            self._seen.put(request_id, known)
        return known

    async def marker(self, request_id: str) -> Marker | None:
        """Return the marker of a request, None if it is not known."""
        return await self._sessions.marker(request_id) or self._seen.get(request_id, None)

    def hand_over(self, request_id: str) -> None:
        """Leave a request to the next router: only the store says what becomes of it."""
        self._seen.put(request_id, None)

    async def forget(self, request_id: str) -> None:
        """Forget a request that was refused, so that it may come again under its id."""
        self._seen.put(request_id, None)
        await self._sessions.unmark(request_id)

    async def may_be_admitted(self, request_id: str) -> bool:
        """Return whether a router before us may have let in a request that came again: then it is never rejected.

        Without a marker it was rejected, or not looked at: rejecting it changes nothing, or is the first time.
        """
        return await self.marker(request_id) is not None or not self._sessions.is_available
