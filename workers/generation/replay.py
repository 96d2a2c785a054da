"""Sets the stream of a run that continues another one against what readers have already.

Knows chunks and what is visible, no engine and no log. The invariant: what `rest` lets through, joined to what was
visible, is the text and the tokens of the whole run, each once; if the run says something else, `has_diverged` tells.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from streams.claims import StreamView
from workers.generation.engine import TokenChunk


@dataclass(slots=True)
class _Seen:
    """What readers have of one choice, and how much of it the run has repeated."""

    token_ids: tuple[int, ...]
    text: str
    num_tokens: int = 0
    num_chars: int = 0

    @property
    def is_repeated(self) -> bool:
        return self.num_tokens == len(self.token_ids) and self.num_chars == len(self.text)


class Replay:
    """Lets through what is new of a run. A run that begins a text replays an empty view."""

    def __init__(self, view: StreamView) -> None:
        self._seen = {index: _Seen(view.token_ids(index), view.text(index)) for index in view.indexes}
        self.has_diverged = False

    @property
    def output(self) -> tuple[tuple[int, ...], ...]:
        """Return the tokens that readers have, by choice: what the engine takes as drawn."""
        num_choices = max(self._seen, default=-1) + 1
        return tuple(self._seen[index].token_ids if index in self._seen else () for index in range(num_choices))

    @property
    def is_complete(self) -> bool:
        """Return whether everything that readers have has been repeated."""
        return all(seen.is_repeated for seen in self._seen.values())

    def rest(self, chunk: TokenChunk) -> TokenChunk | None:
        """Return what readers do not have of a chunk, None if they have all of it or if it differs from what they have.

        Text and tokens are compared apart: a record may hold the text of tokens that stand in an earlier one.
        """
        seen = self._seen.get(chunk.index)
        if seen is None or seen.is_repeated:
            return chunk
        known_ids = seen.token_ids[seen.num_tokens : seen.num_tokens + len(chunk.token_ids)]
        known_text = seen.text[seen.num_chars : seen.num_chars + len(chunk.text)]
        if chunk.token_ids[: len(known_ids)] != known_ids or not chunk.text.startswith(known_text):
            self.has_diverged = True
            return None
        seen.num_tokens += len(known_ids)
        seen.num_chars += len(known_text)
        return _behind(chunk, len(known_ids), len(known_text))


def _behind(chunk: TokenChunk, num_tokens: int, num_chars: int) -> TokenChunk | None:
    token_ids, text = chunk.token_ids[num_tokens:], chunk.text[num_chars:]
    if not token_ids and not text:
        return None
    logprobs = chunk.logprobs[num_tokens:] if chunk.logprobs is not None else None
    return replace(chunk, text=text, token_ids=token_ids, logprobs=logprobs)
