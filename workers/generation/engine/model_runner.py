"""Runs a Llama-family model in torch over a paged cache: the reference on the CPU, and what runs on CUDA.

Knows batches and blocks, no requests. The invariant is that of `attention`: no row sees another sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from workers.generation.engine import cuda_memory
from workers.generation.engine.attention import AttentionPlan, attend
from workers.generation.engine.batch import CacheLayout, StepBatch
from workers.generation.engine.model import LlamaModel
from workers.generation.engine.paged_cache import CacheShape, PagedCache


class TorchRunner:
    """A `ModelRunner` over a loaded model and a cache of its own. `identity` names weights and precision."""

    def __init__(self, model: LlamaModel, shape: CacheShape, *, identity: str) -> None:
        self._model: LlamaModel | None = model
        self._cache: PagedCache | None = PagedCache(shape, model.device)
        self._device = model.device
        self._layout = shape.layout(identity)
        self._vocab_size, self._activation_bytes = model.vocab_size, 0

    @property
    def cache(self) -> PagedCache:
        """Return the cache that steps read and write."""
        assert self._cache is not None, "the runner is closed"
        return self._cache

    @property
    def layout(self) -> CacheLayout:
        """Return the shape of the cache."""
        return self._layout

    @property
    def vocab_size(self) -> int:
        """Return the number of columns of the logits."""
        return self._vocab_size

    @property
    def weights_bytes(self) -> int:
        """Return the bytes of the weights."""
        return 0 if self._model is None else self._model.weights_bytes

    @property
    def activation_bytes(self) -> int:
        """Return about what the widest step so far has kept at once between the layers, with its logits."""
        return self._activation_bytes

    @torch.inference_mode()
    def forward(self, batch: StepBatch) -> torch.Tensor:
        """Return logits `(batch.num_logits, vocab_size)` fp32 on the CPU."""
        model, cache = self._model, self._cache
        assert model is not None and cache is not None, "the runner is closed"
        self._activation_bytes = max(self._activation_bytes, estimate_bytes(model, batch))
        with memory_errors():
            plan = AttentionPlan(
                batch, block_size=cache.shape.block_size, group_size=model.config.group_size, device=self._device
            )
            own = partial(_attend, plan, cache, model.config.windows, model.config.head_dim**-0.5)
            return model.forward(plan.token_ids, plan.positions, own, plan.wanted).cpu()

    def allocator_slack_bytes(self) -> int:
        """Return what CUDA's allocator has reserved and not handed out; 0 on the CPU."""
        return cuda_memory.allocator_slack_bytes(self._device)

    def close(self) -> None:
        """Free weights and cache. Idempotent."""
        self._model = self._cache = None


def estimate_bytes(model: LlamaModel, batch: StepBatch) -> int:
    """Return about what a step keeps at once.

    Of each row the residual, its norm, queries, keys and values, and gate and up; the keys and values of one layer's
    contexts, each twice; the logits in fp32.
    """
    config, size = model.config, model.dtype.itemsize
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    rows = batch.num_tokens * (3 * config.hidden_size + 2 * heads + 3 * config.intermediate_size)
    contexts = sum(segment.end for segment in batch.segments) * 4 * config.num_kv_heads * config.head_dim
    return (rows + contexts) * size + 4 * batch.num_logits * model.vocab_size


def _attend(
    plan: AttentionPlan,
    cache: PagedCache,
    windows: Sequence[int | None],
    scale: float,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> torch.Tensor:
    return attend(plan, cache, layer, query, key, value, scale=scale, window=windows[layer])


@contextmanager
def memory_errors() -> Iterator[None]:
    """Raise MemoryError where torch's allocator of the CPU gives up: it has no exception of its own."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "DefaultCPUAllocator" in str(error):
            raise MemoryError(str(error)) from error
        raise
