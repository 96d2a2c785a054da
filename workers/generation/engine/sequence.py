"""A request inside the engine: its sequences, how far each is, and what it tells its reader.

Knows token ids, block numbers and times, no tensors or threads. The invariant: the cache holds the keys and values of
the first `num_computed` tokens of a sequence, in the blocks of its table, and everything behind them is pending.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

from schemas.tokens import FinishReason, Usage
from workers.generation.engine.detokenizer import Detokenizer
from workers.generation.engine.protocol import ChoiceEnd, EngineEvent, EngineRequest, Finished
from workers.generation.engine.speculation import PromptLookup

if TYPE_CHECKING:
    import torch

    from workers.generation.engine.sampler_state import SamplerState

Emit = Callable[[EngineEvent | Exception], None]
NGRAM = 4  # of `repetition_ratio`


class State(StrEnum):
    """Where a sequence is in its life."""

    NEW = "new"
    """Not queued yet; whoever has its whole output already never is."""
    WAITING = "waiting"
    """No blocks: queued for the first time, or preempted and to be read again."""
    SWAPPED = "swapped"
    """Preempted; its keys and values are in host memory."""
    FOLLOWING = "following"
    """A further choice: it gets the prompt's blocks once the first one has read it."""
    RUNNING = "running"
    """Reads or grows, whenever the budget of a step allows it."""
    ENDED = "ended"
    """Over; it holds nothing."""


class Constraint(Protocol):
    """The form that an answer must have, as far as its tokens have come."""

    @property
    def is_finished(self) -> bool:
        """Say whether nothing but the end of sequence may follow."""
        ...

    def mask(self) -> torch.Tensor:
        """Return the allowed tokens `(ceil(vocab / 32),)` int32, bit i of word w is token 32 w + i."""
        ...

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False if it is not allowed here."""
        ...

    def fork(self) -> Constraint:
        """Return one that goes on from here apart."""
        ...


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of a request. `tokens` are the prompt's and the output's, `key` its place: the lowest goes first.

    `followers` are the choices that wait until this one has read the prompt.
    """

    request: ActiveRequest
    index: int
    key: tuple[int, int, int]
    tokens: list[int]
    sampler: SamplerState
    detokenizer: Detokenizer
    constraint: Constraint | None = None
    state: State = State.NEW
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0
    digests: list[bytes] = field(default_factory=list)  # of the full blocks, as far as they have been asked for
    num_published: int = 0
    followers: list[Sequence] = field(default_factory=list)
    swapped: object = None  # what `read_blocks` has returned
    num_swapped: int = 0
    last_step: int = -1
    lookup: PromptLookup = field(default_factory=PromptLookup)
    end: ChoiceEnd | None = None

    @property
    def num_output(self) -> int:
        """Return how many tokens of the answer are known."""
        return len(self.tokens) - self.request.num_prompt

    @property
    def num_readable(self) -> int:
        """Return how many tokens are to be read before the next is drawn."""
        return self.request.num_prompt if self.followers else len(self.tokens)

    @property
    def is_decoding(self) -> bool:
        """Say whether only the newest token is unread."""
        return len(self.tokens) - self.num_computed == 1 and not self.followers

    def finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        """Note how the choice ended."""
        output = self.tokens[self.request.num_prompt :]
        self.end = ChoiceEnd(
            index=self.index,
            finish_reason=reason,
            num_tokens=len(output),
            stop_reason=stop_reason,
            repetition_ratio=repetition_ratio(output),
        )


@dataclass(slots=True, eq=False)
class ActiveRequest:
    """A request in flight. `emit` hands an event, or the error that ends the stream, to the reader.

    `arrival` counts requests; `root` is where the digests of its blocks begin. Once it is done it lets go of its
    sequences.
    """

    request: EngineRequest
    max_tokens: int
    emit: Emit
    arrival: int
    root: bytes
    submitted_s: float
    sequences: tuple[Sequence, ...] = ()
    admitted_s: float | None = None
    first_token_s: float | None = None
    num_cached: int = 0
    is_done: bool = False

    @property
    def num_prompt(self) -> int:
        """Return the length of the prompt."""
        return len(self.request.prompt)

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
            prompt_tokens=self.num_prompt,
            completion_tokens=sum(end.num_tokens for end in ends),
            cached_tokens=self.num_cached,
        )
        return Finished(
            choices=ends,
            usage=usage,
            queue_ms=(admitted - self.submitted_s) * 1e3,
            prefill_ms=(first - admitted) * 1e3,
            decode_ms=(now_s - first) * 1e3,
        )


def repetition_ratio(output: list[int]) -> float:
    """Return the share of the runs of four tokens that had occurred before."""
    count = len(output) - NGRAM + 1
    if count < 1:
        return 0.0
    return 1 - len(set(zip(*(output[place:] for place in range(NGRAM)), strict=False))) / count
