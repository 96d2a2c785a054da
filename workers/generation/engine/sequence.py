"""A request inside the engine: its sequences, how far each is, and what it tells its reader.

Knows token ids and times, no tensors or threads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from schemas.tokens import FinishReason, Usage
from workers.generation.engine.detokenizer import Detokenizer
from workers.generation.engine.protocol import ChoiceEnd, EngineEvent, EngineRequest, Finished

if TYPE_CHECKING:
    from workers.generation.engine.sampler import Sampler


class Phase(StrEnum):
    """Where a request is in its life."""

    WAITING = "waiting"
    """No slots yet."""
    PREFILL = "prefill"
    """Its prompt is being read, in the slot of its first unfinished choice."""
    DECODE = "decode"
    """Its sequences grow, each once it has read what an earlier run has drawn."""
    DONE = "done"
    """Over; its slots are free."""


@dataclass(slots=True)
class Sequence:
    """One choice of a request. `length` counts the positions that stand in its slot; the other tokens are pending."""

    index: int
    prompt: tuple[int, ...]
    sampler: Sampler
    detokenizer: Detokenizer
    slot: int = -1
    length: int = 0
    output: list[int] = field(default_factory=list)
    end: ChoiceEnd | None = None

    @property
    def num_tokens(self) -> int:
        """Return how many tokens are known: prompt and output."""
        return len(self.prompt) + len(self.output)

    @property
    def num_pending(self) -> int:
        """Return how many known tokens the model has not read; 1 while the sequence grows."""
        return self.num_tokens - self.length

    def pending(self, end: int) -> tuple[int, ...]:
        """Return the tokens from `length` to position `end`."""
        border = len(self.prompt)
        return (*self.prompt[self.length : end], *self.output[max(0, self.length - border) : max(0, end - border)])

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Note how the choice ended."""
        self.end = ChoiceEnd(
            index=self.index, finish_reason=reason, num_tokens=len(self.output), stop_reason=stop_reason
        )


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in flight. `emit` hands an event, or the error that ends the stream, to the reader."""

    request: EngineRequest
    sequences: tuple[Sequence, ...]
    max_tokens: int
    emit: Callable[[EngineEvent | Exception], None]
    submitted_s: float
    phase: Phase = Phase.WAITING
    admitted_s: float | None = None
    first_token_s: float | None = None

    @property
    def unfinished(self) -> list[Sequence]:
        """Return the choices that still grow."""
        return [sequence for sequence in self.sequences if sequence.end is None]

    def finished(self, now_s: float) -> Finished:
        """Return the last event of the stream; every choice has ended."""
        admitted = self.admitted_s if self.admitted_s is not None else now_s
        first = self.first_token_s if self.first_token_s is not None else now_s
        ends = tuple(sequence.end for sequence in self.sequences if sequence.end is not None)
        assert len(ends) == len(self.sequences)
        usage = Usage(
            prompt_tokens=len(self.request.prompt), completion_tokens=sum(len(s.output) for s in self.sequences)
        )
        return Finished(
            choices=ends,
            usage=usage,
            queue_ms=(admitted - self.submitted_s) * 1e3,
            prefill_ms=(first - admitted) * 1e3,
            decode_ms=(now_s - first) * 1e3,
        )
