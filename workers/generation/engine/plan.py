"""What one step runs, and what has to be moved before: decided by the scheduler, carried out by the core."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.sequence import Sequence


@dataclass(slots=True, eq=False)
class Scheduled:
    """Tokens `start` to `end` of a sequence, and guesses behind them. Only who has read all it knows draws on."""

    sequence: Sequence
    start: int
    end: int
    draft: list[int] = field(default_factory=list)
    is_drawing: bool = True

    @property
    def num_rows(self) -> int:
        """Return how many rows the model runs for it."""
        return self.end - self.start + len(self.draft)

    @property
    def num_logits(self) -> int:
        """Return how many rows of logits it gets."""
        return 1 + len(self.draft) if self.is_drawing else 0

    def segment(self) -> Segment:
        """Return what the model is asked for."""
        tokens = self.sequence.tokens[self.start : self.end]
        return Segment(
            token_ids=tokens + self.draft if self.draft else tokens,
            start=self.start,
            block_table=self.sequence.block_table,
            num_logits=self.num_logits,
        )


@dataclass(slots=True, eq=False)
class StepPlan:
    """One step. First `swap_out` is read, then blocks are copied, then `swap_in` is written, then `scheduled` runs."""

    scheduled: list[Scheduled] = field(default_factory=list)
    swap_out: list[tuple[Sequence, list[int]]] = field(default_factory=list)
    copies: list[tuple[Sequence, int, int]] = field(default_factory=list)  # for whom, from, to
    swap_in: list[Sequence] = field(default_factory=list)
    num_rows: int = 0
    num_preempted: int = 0

    @property
    def is_empty(self) -> bool:
        """Say whether there is nothing to run."""
        return not self.scheduled

    def add(self, item: Scheduled) -> None:
        """Run this, too."""
        self.scheduled.append(item)
        self.num_rows += item.num_rows


def step_batch(items: Iterable[Scheduled]) -> StepBatch:
    """Return what the model is asked for."""
    return StepBatch(segments=tuple([item.segment() for item in items]))
