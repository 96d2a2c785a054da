"""Tokens to text as they come: whole characters only, and nothing of a stop string, not even in part.

Knows bytes and strings, no vocabulary. Two invariants: the concatenation of what `push` and `flush` return equals the
decoding of all bytes at once, up to the stop string; and it does not depend on how the bytes were cut.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence


class StopFilter:
    """Holds back the longest suffix that could still become a stop string, and cuts at the first that is complete.

    The stop string that is complete first wins; of those complete at the same character, the longest.
    """

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._stop = tuple(sorted({text for text in stop if text}, key=len, reverse=True))
        self._pending = ""
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Return what may be published now; nothing after a match."""
        if self.matched is not None:
            return ""
        if not self._stop:
            return text
        self._pending += text
        found = self._first_match()
        if found is not None:
            self.matched = found[1]
            released, self._pending = self._pending[: found[0]], ""
            return released
        keep = self._longest_open_suffix()
        cut = len(self._pending) - keep
        released, self._pending = self._pending[:cut], self._pending[cut:]
        return released

    def flush(self) -> str:
        """Return what was held back: the stream is over."""
        released, self._pending = self._pending, ""
        return released

    def _first_match(self) -> tuple[int, str] | None:
        """Return the start and text of the match with the smallest end, the longest of those."""
        best: tuple[int, int, str] | None = None
        for stop in self._stop:  # longest first, so that `<` keeps the longest of equal ends
            start = self._pending.find(stop)
            if start >= 0 and (best is None or start + len(stop) < best[0]):
                best = (start + len(stop), start, stop)
        return (best[1], best[2]) if best else None

    def _longest_open_suffix(self) -> int:
        longest = min(len(self._pending), len(self._stop[0]) - 1)
        for length in range(longest, 0, -1):
            suffix = self._pending[-length:]
            if any(stop.startswith(suffix) for stop in self._stop):
                return length
        return 0


class Detokenizer:
    """Turns the bytes of tokens into text that may be published."""

    def __init__(self, stop: Sequence[str] = ()) -> None:
        self._characters = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._filter = StopFilter(stop)

    @property
    def matched(self) -> str | None:
        """Return the stop string that ended the text, None while none has."""
        return self._filter.matched

    def push(self, piece: bytes) -> str:
        """Return the text that became publishable with the bytes of one more token."""
        return self._filter.push(self._characters.decode(piece))

    def flush(self) -> str:
        """Return the rest: an unfinished character as U+FFFD, and what was held back. The stream is over."""
        released = self._filter.push(self._characters.decode(b"", final=True))
        return released + self._filter.flush()
