"""Keys and values of all sequences, in blocks that one pool hands out.

Knows blocks and layers, no sequences. Keys lie with the positions innermost, `(head_dim, block_size)`, so that the dot
products of a query with a block need no sum across lanes; values the other way round, for the weighted sum. The
invariant: a position that was never written is zero, and what an earlier owner left is finite, so that a masked
position never turns into NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch

from workers.generation.engine.batch import CacheLayout
from workers.generation.engine.cuda_memory import read_blocks, write_blocks
from workers.generation.engine.pages import page_zeros
from workers.generation.engine.protocol import KVPrecision, Precision

KV_DTYPES = {
    KVPrecision.FP32: torch.float32,
    KVPrecision.BF16: torch.bfloat16,
    KVPrecision.FP16: torch.float16,
    KVPrecision.INT8: torch.int8,
}
LAYOUT_VERSION = 1  # raise it whenever equal bytes come to mean other numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """The sizes of a cache."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    num_blocks: int
    block_size: int
    precision: KVPrecision

    @property
    def bytes_per_block(self) -> int:
        """Return the bytes of one block's keys and values with their scales, over all layers."""
        numbers = 2 * self.num_kv_heads * self.head_dim * self.block_size * KV_DTYPES[self.precision].itemsize
        scales = 2 * self.num_kv_heads * self.block_size * 4 if self.precision is KVPrecision.INT8 else 0
        return self.num_layers * (numbers + scales)

    def layout(self, identity: str) -> CacheLayout:
        """Return what the scheduler needs to know; `identity` names model, weights and precision."""
        shape = f"v{LAYOUT_VERSION}/{self.num_layers}x{self.num_kv_heads}x{self.head_dim}x{self.block_size}"
        return CacheLayout(
            num_blocks=self.num_blocks,
            block_size=self.block_size,
            bytes_per_block=self.bytes_per_block,
            identity=f"{identity}/{shape}/{self.precision}",
        )


class PagedCache:
    """`keys` `(num_layers, num_blocks, num_kv_heads, head_dim, block_size)`, `values` with the last two swapped.

    `key_scales` and `value_scales` `(num_layers, num_blocks, num_kv_heads, block_size)` fp32 exist for 8 bits only:
    number = int8 * scale. Memory of a CPU cache is taken page by page as blocks are first written.
    """

    def __init__(self, shape: CacheShape, device: torch.device) -> None:
        self.shape = shape
        lead = (shape.num_layers, shape.num_blocks, shape.num_kv_heads)
        dtype = KV_DTYPES[shape.precision]
        self.keys = _zeros((*lead, shape.head_dim, shape.block_size), dtype, device)
        self.values = _zeros((*lead, shape.block_size, shape.head_dim), dtype, device)
        self.key_scales: torch.Tensor | None = None
        self.value_scales: torch.Tensor | None = None
        if shape.precision is KVPrecision.INT8:
            self.key_scales = _zeros((*lead, shape.block_size), torch.float32, device)
            self.value_scales = _zeros((*lead, shape.block_size), torch.float32, device)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Return all tensors, keys and values first, then the scales where there are any."""
        scales = (tensor for tensor in (self.key_scales, self.value_scales) if tensor is not None)
        return (self.keys, self.values, *scales)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one block in all layers."""
        for tensor in self.tensors():
            tensor[:, target] = tensor[:, source]

    def clear_blocks(self, blocks: Sequence[int]) -> None:
        """Set blocks to zeros in all layers."""
        for tensor in self.tensors():
            tensor[:, list(blocks)] = 0

    def read_blocks(self, blocks: Sequence[int]) -> tuple[torch.Tensor, ...]:
        """Return copies of blocks in host memory, `(num_layers, len(blocks), …)` of each tensor."""
        if self.keys.device.type == "cuda":
            return read_blocks(self.tensors(), blocks)
        return tuple(tensor[:, list(blocks)].cpu() for tensor in self.tensors())

    def write_blocks(self, blocks: Sequence[int], content: object) -> None:
        """Put back what `read_blocks` has returned for as many blocks, bit for bit."""
        parts = cast(Sequence[torch.Tensor], content)
        if self.keys.device.type == "cuda":
            write_blocks(self.tensors(), blocks, parts)
            return
        for tensor, part in zip(self.tensors(), parts, strict=True):
            tensor[:, list(blocks)] = part


def _zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return zeros, on the CPU in pages of their own: torch's allocator would touch every one.

    Raises MemoryError, or what torch's allocator raises.
    """
    return page_zeros(shape, dtype) if device.type == "cpu" else torch.zeros(*shape, dtype=dtype, device=device)


def resolve_kv_precision(wanted: KVPrecision, weights: Precision) -> KVPrecision:
    """Return the number format of the cache: what is wanted, or what suits the weights."""
    if wanted is not KVPrecision.AUTO:
        return wanted
    same = {Precision.FP32: KVPrecision.FP32, Precision.BF16: KVPrecision.BF16}
    return same.get(weights, KVPrecision.FP16)


def quantize_kv(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 `(…, head_dim)` and fp32 scales `(…)` of keys or values `(…, head_dim)`: symmetric, 127 steps.

    Zeros have scale 0.
    """
    wide = numbers.float()
    scales = wide.abs().amax(dim=-1) / 127  # (…)
    safe = torch.where(scales > 0, scales, torch.ones_like(scales))
    return (wide / safe[..., None]).round().clamp(-127, 127).to(torch.int8), scales
