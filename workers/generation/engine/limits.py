"""What the scheduler may give out in one step, and to how many at once. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from workers.generation.engine.settings import Preemption


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of the step loop.

    `max_sequences` counts running choices. `max_batched_tokens` is the budget of one step, over decodes, chunks of
    prompts and drafts; `max_chunk` bounds a chunk. `max_draft` tokens may be guessed ahead of a sequence, 0 for none.
    Guesses fill a step up to `max_speculative_rows` rows, each only if it is right more often than its row costs.
    `swap_blocks` bounds what preempted sequences keep in host memory; what does not fit there is read again.
    """

    max_sequences: int = 8
    max_batched_tokens: int = 512
    max_chunk: int = 256
    max_draft: int = 8
    max_speculative_rows: int = 32
    preemption: Preemption = Preemption.RECOMPUTE
    swap_blocks: int = 0
    has_prefix_cache: bool = True
