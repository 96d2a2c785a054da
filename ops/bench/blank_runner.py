"""A model that computes nothing and a tokenizer without words: for benches of what the scheduler does with blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from workers.generation.engine.batch import CacheLayout, StepBatch
from workers.generation.engine.paged_cache import CacheShape

VOCAB_SIZE = 256
TOKEN = 65  # what it always draws


class BlankCache:
    """A `BlockCache` that holds nothing."""

    def copy_block(self, source: int, target: int) -> None:
        """Nothing to copy."""

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Nothing to clear."""

    def read_blocks(self, blocks: Sequence[int]) -> object:
        """Return nothing."""
        return None

    def write_blocks(self, blocks: Sequence[int], content: object) -> None:
        """Nothing to write."""


class BlankRunner:
    """A `ModelRunner` that keeps no cache and always prefers one token."""

    def __init__(self, *, num_blocks: int, shape: CacheShape) -> None:
        self.layout: CacheLayout = replace(shape.layout("blank"), num_blocks=num_blocks)
        self.vocab_size, self.cache = VOCAB_SIZE, BlankCache()
        self._row = torch.zeros(VOCAB_SIZE)
        self._row[TOKEN] = 1.0

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Return the same logits for each row."""
        return self._row.repeat(batch.num_logits, 1)

    def allocator_slack_bytes(self) -> int:
        """Return 0."""
        return 0

    def close(self) -> None:
        """Nothing to free."""


class BytesTokenizer:
    """A `Tokenizer` whose ids are bytes; no answer ends by itself."""

    eos_token_ids: frozenset[int] = frozenset()

    def encode(self, text: str, *, is_start: bool = False) -> tuple[int, ...]:
        """Return the bytes of text."""
        return tuple(text.encode())

    def encode_control(self, text: str, *, is_start: bool = False) -> tuple[int, ...]:
        """Return the bytes of text."""
        return self.encode(text)

    def count(self, text: str) -> int:
        """Return the number of bytes."""
        return len(text.encode())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of bytes."""
        return bytes(token_ids).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte."""
        return bytes([token_id])
