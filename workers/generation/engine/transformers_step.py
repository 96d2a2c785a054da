"""One step of a `transformers` model over the paged cache: where its rows stand and what they see.

Knows blocks, no model. The invariant: a row reads the positions of its own block table up to itself, and of these only
its layer's window.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.paged_cache import PagedCache, quantize_kv
from workers.generation.engine.transformers_attention import attending


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of one segment within the batch, the blocks that a window leaves visible, and the mask over them."""

    first: int
    last: int
    blocks: torch.Tensor  # (n,)
    visible: torch.Tensor  # (rows, n block_size)


class PagedStep:
    """Writes the keys and values of a batch and attends over the cache, layer by layer."""

    def __init__(self, cache: PagedCache, batch: StepBatch, windows: Sequence[int | None]) -> None:
        self._cache, self._windows = cache, windows
        device, size = cache.keys.device, cache.shape.block_size
        places = [
            (segment.block_table[place // size], place % size, place)
            for segment in batch.segments
            for place in range(segment.start, segment.end)
        ]
        self._blocks, self._offsets, self.positions = torch.tensor(places, device=device).unbind(1)  # (T,) each
        self._rows = {window: _rows(batch.segments, window, size, device) for window in set(windows)}

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: dict[str, Any]
    ) -> torch.Tensor:
        """Return `(T, num_heads, head_dim)`; see `AttentionStep`."""
        self._write(layer, key, value)
        scale = call.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        parts = [
            self._attend(layer, query[rows.first : rows.last], rows, scale, call.get("softcap"))
            for rows in self._rows[self._windows[layer]]
        ]
        return torch.cat(parts)

    def _write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> None:
        cache = self._cache
        if cache.key_scales is not None and cache.value_scales is not None:
            key, cache.key_scales[layer][self._blocks, :, self._offsets] = quantize_kv(key)
            value, cache.value_scales[layer][self._blocks, :, self._offsets] = quantize_kv(value)
        cache.keys[layer][self._blocks, :, :, self._offsets] = key.to(cache.keys.dtype)
        cache.values[layer][self._blocks, :, self._offsets] = value.to(cache.values.dtype)

    def _attend(
        self, layer: int, query: torch.Tensor, rows: _Rows, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """Attend for the rows of one segment; the heads of a group stand as its query positions."""
        keys, values = self._read(layer, rows.blocks, query.dtype)  # (num_kv_heads, positions, head_dim)
        num_rows, num_heads, head_dim = query.shape
        group = num_heads // len(keys)
        flat = query.view(num_rows, len(keys), group, head_dim).permute(1, 2, 0, 3).reshape(len(keys), -1, head_dim)
        visible = rows.visible.repeat(group, 1)  # (group rows, positions)
        if softcap is None:
            mixed = F.scaled_dot_product_attention(flat[None], keys[None], values[None], visible, scale=scale)[0]
        else:
            scores = softcap * torch.tanh((flat @ keys.transpose(1, 2)).float() * scale / softcap)
            weights = scores.masked_fill(~visible, -torch.inf).softmax(dim=-1)
            mixed = weights.to(values.dtype) @ values
        split = mixed.view(len(keys), group, num_rows, head_dim)
        return split.permute(2, 0, 1, 3).reshape(num_rows, num_heads, head_dim)

    def _read(self, layer: int, blocks: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        cache = self._cache
        keys = cache.keys[layer][blocks].to(dtype)  # (n, num_kv_heads, head_dim, block_size)
        values = cache.values[layer][blocks].to(dtype)  # (n, num_kv_heads, block_size, head_dim)
        if cache.key_scales is not None and cache.value_scales is not None:
            keys = keys * cache.key_scales[layer][blocks][:, :, None].to(dtype)
            values = values * cache.value_scales[layer][blocks][..., None].to(dtype)
        return keys.permute(1, 0, 3, 2).flatten(1, 2), values.permute(1, 0, 2, 3).flatten(1, 2)


def run_step(module: Any, cache: PagedCache, batch: StepBatch, windows: Sequence[int | None]) -> torch.Tensor:
    """Return logits `(batch.num_logits, vocab)` fp32 on the model's device: all tokens run as one row of input."""
    step = PagedStep(cache, batch, windows)
    tokens = [token for segment in batch.segments for token in segment.token_ids]
    wanted = torch.tensor(_wanted(batch.segments), dtype=torch.long, device=cache.keys.device)  # (num_logits,)
    keep = {"logits_to_keep": wanted} if module._supports_logits_to_keep() else {}
    with torch.inference_mode(), attending(step):
        logits: torch.Tensor = module(
            input_ids=torch.tensor([tokens], device=cache.keys.device),  # (1, T)
            position_ids=step.positions[None],
            use_cache=False,
            **keep,
        ).logits[0]  # (num_logits or T, vocab)
    return (logits if keep else logits[wanted]).float()


def _wanted(segments: Sequence[Segment]) -> list[int]:
    """Return the rows of the batch that want logits."""
    found: list[int] = []
    last = 0
    for segment in segments:
        last += len(segment.token_ids)
        found.extend(range(last - segment.num_logits, last))
    return found


def _rows(segments: Sequence[Segment], window: int | None, size: int, device: torch.device) -> list[_Rows]:
    found, first = [], 0
    for segment in segments:
        last = first + len(segment.token_ids)
        oldest = 0 if window is None else max(0, segment.start - window + 1) // size
        table = segment.block_table[oldest : -(-segment.end // size)]
        places = torch.arange(oldest * size, (oldest + len(table)) * size, device=device)
        rows = torch.arange(segment.start, segment.end, device=device)[:, None]
        visible = places <= rows if window is None else (places <= rows) & (places > rows - window)
        found.append(_Rows(first, last, torch.tensor(table, device=device), visible))
        first = last
    return found
