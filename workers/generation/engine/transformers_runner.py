"""Runs causal language models of `transformers` under this engine's scheduler, over its paged cache.

For families that the engine has no own forward pass for: GPT-2, Mixtral and other mixtures of experts, OPT, Phi, Gemma.
The invariant is that of `PagedStep`: no row sees another sequence.
"""

from __future__ import annotations

import torch

from workers.generation.engine import cuda_memory
from workers.generation.engine.batch import CacheLayout, StepBatch
from workers.generation.engine.model_runner import memory_errors
from workers.generation.engine.paged_cache import CacheShape, PagedCache
from workers.generation.engine.transformers_model import CausalModel
from workers.generation.engine.transformers_step import make_native_attention, run_step


class TransformersRunner:
    """A `ModelRunner` over a loaded model. `identity` names its weights and precision."""

    def __init__(self, model: CausalModel, shape: CacheShape, *, identity: str) -> None:
        self._model = model
        self._cache = PagedCache(shape, model.module.device)
        self._native = make_native_attention(self._cache, model.attention)
        self._layout = shape.layout(identity)
        self._vocab_size = model.vocab_size

    @property
    def cache(self) -> PagedCache:
        """Return the cache that steps read and write."""
        return self._cache

    @property
    def layout(self) -> CacheLayout:
        """Return the shape of the cache."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """Return the number of columns of the logits."""
        return self._vocab_size

    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Return logits `(batch.num_logits, vocab_size)` fp32 on the CPU."""
        with memory_errors():
            model = self._model
            return run_step(model.module, self._cache, batch, model.attention, self._native).cpu()

    def allocator_slack_bytes(self) -> int:
        """Return what CUDA's allocator has reserved and not handed out; 0 on the CPU."""
        return cuda_memory.allocator_slack_bytes(self._model.module.device)

    def close(self) -> None:
        """Drop threads, weights and cache. Idempotent."""
        for part in ("_native", "_model", "_cache"):
            self.__dict__.pop(part, None)
