"""One step of a `transformers` model over the paged cache.

Knows batches and what layers ask of their attention, no scheduling. Layers attend in C++ where the kernels know what
they ask for, else in torch, over the same cache. The invariant is that of `attention`: no row sees another sequence,
nor more than its layer's window.
"""

from __future__ import annotations

from typing import Any

import torch

from workers.generation.engine.attention import AttentionPlan, attend
from workers.generation.engine.batch import StepBatch
from workers.generation.engine.kernels import load_library
from workers.generation.engine.native_attention import NativeAttention, can_attend
from workers.generation.engine.paged_cache import PagedCache
from workers.generation.engine.transformers_attention import attending
from workers.generation.engine.transformers_probe import AttentionShape


class PagedStep:
    """Writes the keys and values of a batch and attends over the cache, layer by layer."""

    def __init__(
        self, cache: PagedCache, batch: StepBatch, shape: AttentionShape, native: NativeAttention | None
    ) -> None:
        self._cache, self._windows, self._native = cache, shape.windows, native
        self.plan = AttentionPlan(
            batch, block_size=cache.shape.block_size, group_size=shape.group_size, device=cache.keys.device
        )
        if native is not None:
            native.begin(batch)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: dict[str, Any]
    ) -> torch.Tensor:
        """Return `(T, num_heads, head_dim)`; see `AttentionStep`."""
        scaling, softcap = call.get("scaling"), call.get("softcap")
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._native is not None and softcap is None:
            return self._native.attend(layer, query, key, value, scale)
        mixed = attend(
            self.plan,
            self._cache,
            layer,
            query,
            key,
            value,
            scale=scale,
            window=self._windows[layer],
            softcap=softcap,
        )  # (T, num_heads head_dim)
        return mixed.view(query.shape)


def make_native_attention(cache: PagedCache, shape: AttentionShape) -> NativeAttention | None:
    """Return attention in C++ over `cache`, on as many threads as torch's; None where the kernels cannot have it."""
    library = load_library() if can_attend(cache.shape, cache.keys.device) else None
    if library is None:
        return None
    return NativeAttention(
        library, cache, group_size=shape.group_size, windows=shape.windows, num_threads=torch.get_num_threads()
    )


@torch.inference_mode()
def run_step(
    module: Any, cache: PagedCache, batch: StepBatch, shape: AttentionShape, native: NativeAttention | None
) -> torch.Tensor:
    """Return logits `(batch.num_logits, vocab)` fp32 on the model's device: all tokens run as one row of input."""
    step = PagedStep(cache, batch, shape, native)
    plan = step.plan
    keep = {"logits_to_keep": plan.wanted} if module._supports_logits_to_keep() else {}
    with attending(step):
        output = module(input_ids=plan.token_ids[None], position_ids=plan.positions[None], use_cache=False, **keep)
    logits: torch.Tensor = output.logits[0]  # (num_logits or T, vocab)
    return (logits if keep else logits[plan.wanted]).float()
