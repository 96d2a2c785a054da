"""Which offset of one partition may be committed while its work completes out of order.

Pure: knows offsets, not records, tasks or brokers. It is built from *received* records, so that offsets which
compaction has removed never block. The invariant: `committable` never passes an offset that was started and is not
finished, and passes every finished one below the first unfinished.
"""

from __future__ import annotations

import heapq


class OffsetTracker:
    """Follows the received offsets of one partition from `start` to `finish`."""

    def __init__(self) -> None:
        self._first: int | None = None
        self._last = -1
        self._next: int | None = None  # all received offsets below it are finished
        self._order: list[int] = []  # heap of the received offsets that `_next` has not passed
        self._running: set[int] = set()
        self._finished: set[int] = set()  # finished offsets at or above the first unfinished

    def start(self, offset: int) -> bool:
        """Note that the record at `offset` was received; False if it is known: that changes nothing."""
        if offset > self._last:  # as nearly always
            self._last = offset
            if self._first is None:
                self._first = offset
        elif offset in self._running or self.is_finished(offset):
            return False
        else:
            self._first = offset if self._first is None else min(self._first, offset)
        self._running.add(offset)
        heapq.heappush(self._order, offset)
        return True

    def finish(self, offset: int) -> bool:
        """Note that the work of `offset` is done; False if it is not running."""
        if offset not in self._running:
            return False
        self._running.remove(offset)
        self._finished.add(offset)
        while self._order and self._order[0] in self._finished:
            passed = heapq.heappop(self._order)
            self._finished.remove(passed)
            self._next = max(self._next or 0, passed + 1)
        return True

    def committable(self) -> int | None:
        """Return the highest contiguous finished offset + 1, None if nothing was finished from the start on."""
        if self._next is None:
            return None
        if self._order and self._order[0] < self._next:  # an older record came back after newer ones were finished
            return self._order[0]
        return self._next

    def is_running(self, offset: int) -> bool:
        """Return whether the record was received and is not finished."""
        return offset in self._running

    def is_finished(self, offset: int) -> bool:
        """Return whether the record was received and its work is done."""
        if offset in self._finished:
            return True
        is_passed = self._first is not None and self._next is not None and self._first <= offset < self._next
        return is_passed and offset not in self._running

    @property
    def span(self) -> int:
        """Return how many offsets lie from the first unfinished to the last received one."""
        return self._last - self._order[0] + 1 if self._order else 0

    @property
    def end(self) -> int:
        """Return the offset after the highest received one, 0 before the first."""
        return self._last + 1

    @property
    def num_running(self) -> int:
        """Return how many received records are not finished."""
        return len(self._running)
