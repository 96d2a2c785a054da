"""Holds an engine's text back by sentences, and lets through those that may be published.

Knows chunks and a question to ask, no engine. The invariant: a chunk is released only if every sentence that it belongs
to has been accepted; after the first refusal nothing is.
"""

from __future__ import annotations

from collections.abc import Callable

from workers.generation.engine.protocol import TokenChunk
from workers.generation.strategies.evidence import sentences

SENTENCE_MARKS = (".", "!", "?", "。", "！", "？", '."', '!"', '?"', ".”", "!”", "?”", ".)", "。”")


class SentenceGate:
    """The gate of one choice. `is_closed` after a refusal."""

    def __init__(self, may_publish: Callable[[str], bool]) -> None:
        self._may_publish = may_publish
        self._text = ""
        self._held: list[tuple[TokenChunk, int]] = []  # with the place in `_text` where each ends
        self.is_closed = False

    def push(self, chunk: TokenChunk) -> list[TokenChunk]:
        """Take a chunk and return what may go out now. A sentence is complete once the next one has begun."""
        if self.is_closed:
            return []
        self._text += chunk.text
        self._held.append((chunk, len(self._text)))
        found = sentences(self._text)
        if len(found) < 2:
            return []
        return self._judge([sentence.text for sentence in found[:-1]], found[-2].end, found[-1].start)

    def flush(self) -> list[TokenChunk]:
        """Return the rest if it is a whole sentence that is accepted: the text is over."""
        rest = self._text.strip()
        released: list[TokenChunk] = []
        if not self.is_closed and rest.endswith(SENTENCE_MARKS):
            released = self._judge([rest], len(self._text), len(self._text))
        self.is_closed = True
        return released

    def _judge(self, complete: list[str], end: int, next_start: int) -> list[TokenChunk]:
        """Release the chunks up to `end`, where the last complete sentence ends; one may reach up to the next."""
        if not all(map(self._may_publish, complete)):
            self.is_closed = True
            return []
        count = place = 0
        while count < len(self._held) and place < end and self._held[count][1] <= next_start:
            place = self._held[count][1]
            count += 1
        released = [chunk for chunk, _ in self._held[:count]]
        self._text = self._text[place:]
        self._held = [(chunk, stop - place) for chunk, stop in self._held[count:]]
        return released
