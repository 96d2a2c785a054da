"""Whose readers are gone: a request with `reader_lease_s` is given up when none has said for so long that he is there.

Knows ids and times, not requests or topics. A lease runs from the moment its request came into our hands, or from the
reader's last word, whichever is later; two readers of a request keep it alike. While we could not hear (the control
topic is not being read), no lease lapses, and afterwards each begins anew.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from streams.expiring import ExpiringMap

MAX_LEASE_S = 3_600.0  # the longest that `schemas.request.RANGES` allows
NEVER = float("-inf")
Key = tuple[str, str]  # request_id, tenant


class LeaseWatch:
    """The leases of the requests that this worker holds. `on_lapse` is told of each that has run out."""

    def __init__(
        self, on_lapse: Callable[[Key], None], *, max_ids: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_lapse = on_lapse
        self._clock = clock
        self._heard_at: ExpiringMap[Key, float] = ExpiringMap(max_age_s=MAX_LEASE_S, max_items=max_ids, clock=clock)
        self._held: dict[Key, list[float]] = {}
        self._since: dict[Key, float] = {}
        self.is_hearing = False
        """Whether readers can be heard at all."""
        self._hearing_since = NEVER

    @property
    def num_held(self) -> int:
        """Return how many requests with a lease are in our hands."""
        return len(self._held)

    def alive(self, key: Key) -> None:
        """Note that a reader of the request is there."""
        self._heard_at.put(key, self._clock())

    def last_heard(self, key: Key) -> float:
        """Return when a reader of the request last said that he is there, minus infinity if none did of late."""
        return self._heard_at.get(key, NEVER)

    def hear(self, is_hearing: bool) -> None:
        """Note whether readers can be heard at all."""
        if is_hearing and not self.is_hearing:
            self._hearing_since = self._clock()
        self.is_hearing = is_hearing

    @contextmanager
    def hold(self, key: Key, lease_s: float | None) -> Iterator[None]:
        """Watch over a request's lease while it is in our hands; the shortest of several holders counts."""
        if lease_s is None:
            yield
            return
        self._held.setdefault(key, []).append(lease_s)
        # A reader who was heard before is not asked to start anew in each pool; nobody heard: from now on.
        self._since.setdefault(key, self._heard_at.get(key, self._clock()))
        try:
            yield
        finally:
            self._held[key].remove(lease_s)
            if not self._held[key]:
                del self._held[key], self._since[key]

    def check(self) -> None:
        """Let the leases lapse whose time is over; call it often."""
        if not self.is_hearing:
            return
        now = self._clock()
        for key, leases in list(self._held.items()):
            last = max(self._since[key], self._hearing_since, self.last_heard(key))
            if now - last >= min(leases):
                self._on_lapse(key)

    def statistics(self) -> dict[str, int]:
        """Return how many leases are watched and how many readers were heard of late."""
        return {"leases": len(self._held), "readers": len(self._heard_at)}
