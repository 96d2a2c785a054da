"""How fast steps are, smoothed over the last ones. Pure.

The invariant: work that needs no step leaves the numbers alone.
"""

from __future__ import annotations

from dataclasses import dataclass

SMOOTHING = 0.1  # weight of the newest step: after ten steps two thirds of what was before is forgotten


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """One step: how long it took, the tokens that went through the model, the sequences that they belong to."""

    seconds: float
    num_tokens: int
    batch_size: int


@dataclass(slots=True)
class Pace:
    """Smoothed time and tokens of a step."""

    num_steps: int = 0
    step_ms: float = 0.0
    step_tokens: float = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens drawn in a second of steps."""
        return self.step_tokens / self.step_ms * 1e3 if self.step_ms else 0.0

    def note(self, step_ms: float, num_tokens: int) -> None:
        """Take one more step: how long it took, and how many tokens it has drawn."""
        weight = SMOOTHING if self.num_steps else 1.0
        self.step_ms += weight * (step_ms - self.step_ms)
        self.step_tokens += weight * (num_tokens - self.step_tokens)
        self.num_steps += 1
