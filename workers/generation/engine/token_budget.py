"""How many tokens a step may hold: what is configured, or for a while less after a step that did not fit in memory."""

from __future__ import annotations

MIN_TOKENS = 2  # one for who decodes, one for who reads
RECOVERY_STEPS = 64  # without a failure, then the budget doubles


class TokenBudget:
    """Halves at a failure, doubles after `RECOVERY_STEPS` steps without one, never above what is configured."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max(MIN_TOKENS, max_tokens)
        self._num_good = 0
        self.num_tokens = self._max_tokens

    def lower(self, num_tokens: int) -> None:
        """Note that a step of so many tokens was too large."""
        self.num_tokens = max(MIN_TOKENS, min(self.num_tokens, num_tokens) // 2)
        self._num_good = 0

    def note_success(self) -> None:
        """Note a step that fitted."""
        if self.num_tokens < self._max_tokens:
            self._num_good += 1
            if self._num_good >= RECOVERY_STEPS:
                self.num_tokens = min(2 * self.num_tokens, self._max_tokens)
                self._num_good = 0
