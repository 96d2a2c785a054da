"""Finds out whether the fused decode attention runs on a device, before a request depends on it.

Knows the kernel, no model. Triton compiles at run time: it needs its package, a C compiler and Python's headers. Where
one is missing, or the result is wrong, torch's own attention does the work.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog
import torch

from workers.generation.engine.paged_cache import CacheShape, PagedCache

_log = structlog.get_logger(__name__)

PagedAttention = Callable[..., torch.Tensor]
"""As `kernels.paged_attention.paged_attention`."""
WITHIN = 1e-2  # of numbers between 0 and 1 in 16 bits, or in 8


def find_paged_attention(
    shape: CacheShape, group_size: int, dtype: torch.dtype, *, split: int
) -> PagedAttention | None:
    """Return the fused attention for queries of a dtype over a cache of this shape on CUDA; None where it cannot run.

    Why not is logged. What is compiled for the trial serves the model, if it cuts contexts by the same `split`.
    """
    if not torch.cuda.is_available():
        return None
    try:
        from workers.generation.engine.kernels.paged_attention import paged_attention

        fault = try_paged_attention(paged_attention, shape, group_size, dtype, split, torch.device("cuda"))
    except Exception as error:  # a compiler's errors are of every kind
        fault = repr(error)
    if fault:
        _log.warning("attention.unfused", reason=fault)
        return None
    return paged_attention


def try_paged_attention(
    attend: PagedAttention,
    shape: CacheShape,
    group_size: int,
    dtype: torch.dtype,
    split: int,
    device: torch.device,
) -> str:
    """Return what is wrong with a kernel on a device, empty if nothing: it must average the values of equal keys."""
    blocks = 2
    small = CacheShape(
        num_layers=1,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        num_blocks=blocks,
        block_size=shape.block_size,
        precision=shape.precision,
    )
    cache = PagedCache(small, device)
    length = shape.block_size + 1
    cache.values[0, 1] = 1
    if cache.key_scales is not None and cache.value_scales is not None:
        cache.key_scales.fill_(1)
        cache.value_scales.fill_(1)
    mixed = attend(
        torch.ones((1, shape.num_kv_heads * group_size, shape.head_dim), dtype=dtype, device=device),
        cache.keys[0],
        cache.values[0],
        torch.tensor([[1, 0]], dtype=torch.int32, device=device),
        torch.tensor([length], dtype=torch.int32, device=device),
        max_length=length,
        scale=shape.head_dim**-0.5,
        split=split,
        key_scales=None if cache.key_scales is None else cache.key_scales[0],
        value_scales=None if cache.value_scales is None else cache.value_scales[0],
    )
    error = float((mixed.float() - shape.block_size / length).abs().max())  # block_size ones and a zero
    return "" if error < WITHIN else f"the fused attention is off by {error:.3g}"
