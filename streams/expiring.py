"""A map that forgets: each entry after its time, and the oldest when there are too many.

Knows no requests. The invariant: at most `max_items` entries, none older than `max_age_s`.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class ExpiringMap(Generic[K, V]):
    """Entries by the time they were put last. `clock` counts seconds and never goes back."""

    def __init__(self, *, max_age_s: float, max_items: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_age_s = max_age_s
        self._max_items = max_items
        self._clock = clock
        self._entries: OrderedDict[K, tuple[V, float]] = OrderedDict()  # the oldest first

    def put(self, key: K, value: V) -> None:
        """Set an entry; its time begins anew."""
        self._entries[key] = (value, self._clock())
        self._entries.move_to_end(key)
        self._forget()

    def get(self, key: K, default: V) -> V:
        """Return an entry that is not too old, else `default`."""
        self._forget()
        return self._entries[key][0] if key in self._entries else default

    def __contains__(self, key: K) -> bool:
        self._forget()
        return key in self._entries

    def __len__(self) -> int:
        self._forget()
        return len(self._entries)

    def _forget(self) -> None:
        oldest_allowed = self._clock() - self._max_age_s
        while self._entries:
            _, put_at = next(iter(self._entries.values()))
            if len(self._entries) <= self._max_items and put_at >= oldest_allowed:
                return
            self._entries.popitem(last=False)
