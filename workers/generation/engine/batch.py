"""What a model runs in one step, and what runs it.

Knows token ids and block numbers, no requests, texts or tensors of a model. The invariant: a segment's rows attend to
the positions of its own block table only, so that no sequence can see another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one sequence: a chunk of a prompt, or the last token with drafted ones behind it.

    `start` is the position of the first token; what stands before it is in the cache. `block_table` are the blocks of
    positions 0 to `end`, block_size positions each. The last `num_logits` tokens want their logits: none for a chunk
    that does not end the prompt, one for a decode, one more for each drafted token.
    """

    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    num_logits: int = 1

    @property
    def end(self) -> int:
        """Return the position behind the last token: the length of the context afterwards."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBatch:
    """The segments of one step. Each sequence is in at most one of them; no block that is written is shared."""

    segments: tuple[Segment, ...]

    @property
    def num_tokens(self) -> int:
        """Return the rows that the model runs."""
        return sum(len(segment.token_ids) for segment in self.segments)

    @property
    def num_logits(self) -> int:
        """Return the rows of logits."""
        return sum(segment.num_logits for segment in self.segments)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """The shape of a paged cache. `identity` names whatever makes equal tokens have other keys and values elsewhere."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    identity: str


class BlockCache(Protocol):
    """The blocks of a paged cache, carried about. All methods belong to the engine's thread."""

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers."""
        ...

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Set blocks to zeros: a failure may have left numbers there that are not finite."""
        ...

    def read_blocks(self, blocks: Sequence[int]) -> object:
        """Return the content of blocks outside the cache (host memory), for `write_blocks`; never changed by a step."""
        ...

    def write_blocks(self, blocks: Sequence[int], content: object) -> None:
        """Put back, bit for bit, what `read_blocks` has returned for as many blocks."""
        ...


class ModelRunner(Protocol):
    """A model with its paged cache. All methods belong to the engine's thread."""

    @property
    def cache(self) -> BlockCache:
        """Return the cache that its steps read and write."""
        ...

    @property
    def layout(self) -> CacheLayout:
        """Return the shape of the cache."""
        ...

    @property
    def vocab_size(self) -> int:
        """Return the number of columns of the logits."""
        ...

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Return logits `(batch.num_logits, vocab_size)` fp32 on the CPU, in the order of the segments.

        Keys and values are written at the tokens' positions, so a step that failed half-way may be repeated. Raises
        torch.OutOfMemoryError or MemoryError where the step is too large.
        """
        ...

    def allocator_slack_bytes(self) -> int:
        """Return what the device's allocator has reserved and not handed out; 0 where it tells nothing."""
        ...

    def close(self) -> None:
        """Free weights, cache and processes. Idempotent."""
        ...
