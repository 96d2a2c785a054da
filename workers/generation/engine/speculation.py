"""Guesses the next tokens of a sequence by looking up where its last ones occurred before (prompt look-up decoding,
Saxena 2023). Answers that quote their prompt, or repeat themselves, are guessed many tokens ahead.

Knows token ids of one sequence, no model: a guess costs rows of a step, never a token of the answer. The invariant:
what is proposed depends on the tokens and on what became of earlier proposals alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

SIZES = (3, 2)  # of the n-grams, the surest first
START = 0.6  # share of right guesses that a new sequence is credited with
RETRY = 0.3  # and one that tries again after a pause
USELESS = 0.08  # a lower share of right guesses brings a pause
WEIGHT = 0.3  # of the newest proposal in the share
REGAIN = 0.01  # of the way back to START, at each step without a proposal
MIN_PAUSE, MAX_PAUSE = 8, 128  # tokens drawn without a proposal; each pause in a row is twice as long


class PromptLookup:
    """The n-grams of one sequence, and how well they have guessed so far."""

    def __init__(self) -> None:
        self.share = START
        """How likely the next guess is right, as far as the last ones tell."""
        self._following: dict[tuple[int, ...], int] = {}  # n-gram to the position behind its latest occurrence
        self._num_indexed = 0
        self._pause = MIN_PAUSE
        self._resume_at = 0  # number of tokens from which on it proposes again

    def num_wanted(self, num_tokens: int, max_draft: int, cost: float) -> int:
        """Return how many tokens are worth guessing for a sequence of this length; none for a while after failures.

        `cost` is that of one more row in tokens: the last guess must be right, with all before it, more often.
        """
        if num_tokens < self._resume_at or self.share <= cost:
            return 0
        if self.share >= 1:
            return max_draft
        return min(max_draft, int(math.log(cost) / math.log(self.share)))

    def propose(self, tokens: Sequence[int], max_draft: int) -> list[int]:
        """Return up to `max_draft` tokens that followed the last ones before; none if these are new."""
        self._index(tokens)
        for size in SIZES:
            start = self._following.get(tuple(tokens[-size:]))
            if start is not None:
                return _continued(tokens, start, max_draft)
        return []

    def record(self, num_tokens: int, num_draft: int, num_accepted: int) -> None:
        """Note how many tokens of a proposal were right; `num_tokens` is the sequence's length by now."""
        num_tried = min(num_accepted + 1, num_draft)  # those behind the first wrong one say nothing
        self.share += WEIGHT * (num_accepted / num_tried - self.share)
        if num_accepted:
            self._pause = MIN_PAUSE
        elif self.share < USELESS:
            self._resume_at = num_tokens + self._pause
            self._pause = min(2 * self._pause, MAX_PAUSE)
            self.share = RETRY

    def pass_over(self) -> None:
        """Note a step without a proposal: who is not tried is slowly trusted again."""
        self.share += REGAIN * (START - self.share)

    def _index(self, tokens: Sequence[int]) -> None:
        """Add the n-grams that have got a follower since the last call."""
        end = len(tokens)
        for size in SIZES:
            first = max(size, self._num_indexed)  # the first follower that is new
            if first < end:
                columns = (tokens[first - size + place : end - size + place] for place in range(size))
                self._following.update(zip(zip(*columns, strict=True), range(first, end), strict=True))
        self._num_indexed = len(tokens)


def _continued(tokens: Sequence[int], start: int, count: int) -> list[int]:
    """Return what follows `start`; beyond the last token it goes on as it did between there and here."""
    draft = list(tokens[start : start + count])
    while len(draft) < count:
        draft += draft[: count - len(draft)]
    return draft
