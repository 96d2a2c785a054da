"""Attention of one step over a paged cache in torch: where its rows are written, what they read and what they see.

Knows segments and blocks, no model. Steps of few rows a sequence (decodes, drafts) attend together, chunks of prompts
one by one. The invariant: a row reads blocks of its own table only, so that nothing of another sequence, not even a
number that is not finite, can reach it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)

from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.paged_cache import PagedCache, quantize_kv

MAX_SHARED_ROWS = 16  # of a segment that attends together with others: drafts and the shortest chunks


@dataclass(frozen=True, slots=True)
class _Group:
    """Segments that attend together, n with q rows and up to b blocks each.

    Shorter ones repeat their own last row and block: a repeated row is computed twice, a repeated block is masked.
    """

    rows: torch.Tensor  # (n, q) of the batch
    tables: torch.Tensor  # (n, b)
    visible: torch.Tensor  # (n, 1, group_size q, b block_size) bool


class AttentionPlan:
    """What all layers of a step share. `group_size` query heads share a key/value head; `size` positions are a block.

    `token_ids` and `positions` are the rows of the batch `(T,)`, `wanted` those that want logits `(num_logits,)`.
    """

    def __init__(self, batch: StepBatch, *, block_size: int, group_size: int, device: torch.device) -> None:
        self._segments, self._size, self._group_size, self._device = batch.segments, block_size, group_size, device
        self._groups: dict[int | None, list[_Group]] = {}
        self._firsts = list(_firsts(batch.segments))
        tokens = [token for segment in batch.segments for token in segment.token_ids]
        places = [place for segment in batch.segments for place in range(segment.start, segment.end)]
        blocks = [
            segment.block_table[place // block_size]
            for segment in batch.segments
            for place in range(segment.start, segment.end)
        ]
        numbers = torch.tensor([tokens, places, blocks], device=device)  # (3, T)
        self.token_ids, self.positions, self.blocks = numbers.unbind(0)  # (T,) each
        self.offsets = self.positions % block_size  # (T,)
        self.wanted = torch.tensor(list(_wanted(batch.segments)), dtype=torch.int64, device=device)

    def groups(self, window: int | None) -> Sequence[_Group]:
        """Return the segments in groups, with what a window leaves visible. Made once for each window."""
        if window not in self._groups:
            spans = [_Span.of(*pair, window, self._size) for pair in zip(self._segments, self._firsts, strict=True)]
            self._groups[window] = [self._group(group, window) for group in _together(spans)]
        return self._groups[window]

    def _group(self, spans: Sequence[_Span], window: int | None) -> _Group:
        num_rows, num_blocks = max(span.num_rows for span in spans), max(len(span.table) for span in spans)
        rows = torch.tensor([span.padded_rows(num_rows) for span in spans], device=self._device)  # (n, q)
        tables = torch.tensor([span.padded_table(num_blocks) for span in spans], device=self._device)  # (n, b)
        starts = torch.tensor([span.start for span in spans], device=self._device)
        places = starts[:, None, None] + torch.arange(num_blocks * self._size, device=self._device)  # (n, 1, L)
        own = self.positions[rows][..., None]  # (n, q, 1)
        visible = places <= own if window is None else (places <= own) & (places > own - window)  # (n, q, L)
        return _Group(rows, tables, visible.repeat(1, self._group_size, 1)[:, None])


def attend(
    plan: AttentionPlan,
    cache: PagedCache,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Write keys and values `(T, num_kv_heads, head_dim)`, then attend from `query` `(T, num_heads, head_dim)`.

    Returns `(T, num_heads * head_dim)`. `softcap` bounds the scores smoothly to plus and minus itself (Gemma 2).
    """
    write(cache, layer, plan.blocks, plan.offsets, key, value)
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = cache.shape.num_kv_heads
    heads = query.view(num_rows, num_kv_heads, -1, head_dim)  # (T, kv, g, d)
    mixed = torch.empty_like(heads, memory_format=torch.contiguous_format)
    for group in plan.groups(window):
        count, width = group.rows.shape
        keys, values = read(cache, layer, group.tables, query.dtype)  # (n, kv, L, d) each
        rows = heads[group.rows].permute(0, 2, 3, 1, 4)  # (n, kv, g, q, d)
        flat = rows.reshape(count, num_kv_heads, -1, head_dim)  # (n, kv, g q, d)
        if softcap is None:
            found = F.scaled_dot_product_attention(flat, keys, values, attn_mask=group.visible, scale=scale)
        else:
            found = _mix_capped(flat, keys, values, group.visible, scale, softcap)
        mixed[group.rows] = found.view(count, num_kv_heads, -1, width, head_dim).permute(0, 3, 1, 2, 4)
    return mixed.view(num_rows, num_heads * head_dim)


def _mix_capped(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    visible: torch.Tensor,
    scale: float,
    softcap: float,
) -> torch.Tensor:
    """Return what torch's own attention would, with capped scores, which it does not have."""
    scores = softcap * torch.tanh((query @ keys.transpose(-1, -2)).float() * (scale / softcap))  # (n, kv, g q, L)
    return scores.masked_fill(~visible, -torch.inf).softmax(dim=-1).to(values.dtype) @ values


def write(
    cache: PagedCache,
    layer: int,
    blocks: torch.Tensor,
    offsets: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Write keys and values `(T, num_kv_heads, head_dim)` to places `(T,)` in the number format of the cache."""
    if cache.key_scales is not None and cache.value_scales is not None:
        key, cache.key_scales[layer][blocks, :, offsets] = quantize_kv(key)
        value, cache.value_scales[layer][blocks, :, offsets] = quantize_kv(value)
    cache.keys[layer][blocks, :, :, offsets] = key.to(cache.keys.dtype)
    cache.values[layer][blocks, :, offsets] = value.to(cache.values.dtype)


def read(cache: PagedCache, layer: int, tables: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return copies of keys and values `(n, num_kv_heads, b block_size, head_dim)` of tables `(n, b)`."""
    shape = cache.shape
    lead = (len(tables), shape.num_kv_heads, tables.shape[1])
    heads = torch.arange(shape.num_kv_heads, device=tables.device)[:, None]  # (kv, 1)
    rows = (tables[:, None] * shape.num_kv_heads + heads).flatten()  # (n kv b) of all blocks' heads

    def gather(tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor[layer].flatten(0, 1).index_select(0, rows)
        return whole.view(*lead, *whole.shape[1:])  # (n, kv, b, …)

    keys, values = gather(cache.keys).to(dtype), gather(cache.values).to(dtype)
    if cache.key_scales is not None and cache.value_scales is not None:
        keys *= gather(cache.key_scales)[:, :, :, None].to(dtype)
        values *= gather(cache.value_scales)[..., None].to(dtype)
    return keys.transpose(-1, -2).flatten(2, 3), values.flatten(2, 3)


@dataclass(frozen=True, slots=True)
class _Span:
    """The rows of a segment within the batch, and the blocks that its window leaves visible."""

    first: int
    num_rows: int
    start: int  # position of the first visible block
    table: Sequence[int]

    @classmethod
    def of(cls, segment: Segment, first: int, window: int | None, size: int) -> _Span:
        oldest = 0 if window is None else max(0, segment.start - window + 1) // size
        table = segment.block_table[oldest : -(-segment.end // size)]
        return cls(first, len(segment.token_ids), oldest * size, table)

    def padded_rows(self, count: int) -> list[int]:
        last = self.first + self.num_rows - 1
        return [min(self.first + row, last) for row in range(count)]

    def padded_table(self, count: int) -> list[int]:
        return [*self.table, *[self.table[-1]] * (count - len(self.table))]


def _together(spans: Sequence[_Span]) -> Iterator[list[_Span]]:
    """Group segments of few rows whose rows and blocks are within a power of two; the others stand alone."""
    groups: dict[tuple[int, int], list[_Span]] = {}
    for span in spans:
        if span.num_rows > MAX_SHARED_ROWS:
            yield [span]
        else:
            groups.setdefault((span.num_rows.bit_length(), len(span.table).bit_length()), []).append(span)
    yield from groups.values()


def _firsts(segments: Sequence[Segment]) -> Iterator[int]:
    first = 0
    for segment in segments:
        yield first
        first += len(segment.token_ids)


def _wanted(segments: Sequence[Segment]) -> Iterator[int]:
    for first, segment in zip(_firsts(segments), segments, strict=True):
        last = first + len(segment.token_ids)
        yield from range(last - segment.num_logits, last)
