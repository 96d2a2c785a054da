"""A StateStore in this process, for tests and for trying things out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from schemas.errors import StoreUnavailableError


class MemoryStore:
    """A StateStore in this process, for tests and single-process use. `clock` counts seconds; `down` makes it fail."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.down = False
        self._clock = clock
        self._values: dict[str, tuple[bytes, float]] = {}
        self._lists: dict[str, tuple[dict[str, bytes], float]] = {}

    async def get(self, key: str) -> bytes | None:
        """Return the value, None if there is none."""
        self._check()
        value, expires = self._values.get(key, (None, 0.0))
        return value if expires > self._clock() else None

    async def set(self, key: str, value: bytes, *, ttl_s: float) -> None:
        """Set the value."""
        self._check()
        self._values[key] = (value, self._clock() + ttl_s)

    async def set_if_absent(self, key: str, value: bytes, *, ttl_s: float) -> bytes:
        """Set the value unless there is one, and return the one that stands now."""
        found = await self.get(key)
        if found is None:
            self._values[key] = (value, self._clock() + ttl_s)
        return value if found is None else found

    async def delete(self, key: str) -> None:
        """Remove a value or a list."""
        self._check()
        self._values.pop(key, None)
        self._lists.pop(key, None)

    async def append(self, key: str, item_id: str, item: bytes, *, max_items: int, ttl_s: float) -> bool:
        """Append an item to a list; False if its id is in the list."""
        self._check()
        items = self._items(key)
        if item_id in items:
            return False
        kept = list({**items, item_id: item}.items())[-max_items:]
        self._lists[key] = (dict(kept), self._clock() + ttl_s)
        return True

    async def last(self, key: str, count: int) -> Sequence[bytes]:
        """Return the last items of a list, oldest first."""
        self._check()
        return tuple(self._items(key).values())[-count:] if count >= 1 else ()

    async def ping(self) -> None:
        """Return if the store answers."""
        self._check()

    async def close(self) -> None:
        """Close; there is nothing to release."""

    def _check(self) -> None:
        if self.down:
            raise StoreUnavailableError("the store is down")

    def _items(self, key: str) -> dict[str, bytes]:
        items, expires = self._lists.get(key, ({}, 0.0))
        return items if expires > self._clock() else {}
