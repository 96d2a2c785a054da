"""What the rows of a step attend to on CUDA: decodes and drafts through the fused kernel, chunks of prompts in torch.

Knows segments and blocks, no weights. The invariant: a row attends to its own block table only, in whatever order the
rows stand. Rows of the fused kernel come first, so that no layer has to gather them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from workers.generation.engine.attention import MAX_SHARED_ROWS, AttentionPlan, attend, write
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.cuda_attention import PagedAttention
from workers.generation.engine.cuda_graph import DecodeRows, buffer_size, fill, views
from workers.generation.engine.paged_cache import PagedCache


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """What attention needs beside the rows: the cache, each layer's window, the scale of products.

    `kernel` is the fused attention, None where it does not run; `split` is how it cuts contexts.
    """

    cache: PagedCache
    windows: Sequence[int | None]
    scale: float
    group_size: int
    kernel: PagedAttention | None
    split: int


class FusedRows:
    """One token of each row. Rows of one sequence may stand together: keys and values are written before any reads."""

    def __init__(self, layers: LayerAttention, rows: DecodeRows, *, max_length: int) -> None:
        places, size = rows.positions.long(), layers.cache.shape.block_size
        self._layers, self._rows, self._max_length = layers, rows, max_length
        self._blocks = rows.tables.gather(1, (places // size)[:, None]).squeeze(1).long()  # (N,)
        self._offsets = places % size  # (N,)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `(N, num_heads head_dim)`, see `model.Attend`."""
        layers, cache = self._layers, self._layers.cache
        assert layers.kernel is not None, "only rows of a fused kernel stand here"
        write(cache, layer, self._blocks, self._offsets, key, value)
        mixed = layers.kernel(
            query,
            cache.keys[layer],
            cache.values[layer],
            self._rows.tables,
            self._rows.lengths,
            max_length=self._max_length,
            scale=layers.scale,
            window=layers.windows[layer],
            split=layers.split,
            key_scales=None if cache.key_scales is None else cache.key_scales[layer],
            value_scales=None if cache.value_scales is None else cache.value_scales[layer],
        )
        return mixed.flatten(1)


class MixedStep:
    """A step that is run as it is. `token_ids` and `positions` `(T,)` are its rows, fused ones first.

    `wanted` `(num_logits,)` are the rows that want logits, in the order of the batch's segments.
    """

    def __init__(self, layers: LayerAttention, batch: StepBatch, device: torch.device) -> None:
        self._layers = layers
        is_fused = [layers.kernel is not None and len(one.token_ids) <= MAX_SHARED_ROWS for one in batch.segments]
        order = sorted(range(len(is_fused)), key=lambda place: not is_fused[place])
        ordered = [batch.segments[place] for place in order]
        short, long = ordered[: sum(is_fused)], ordered[sum(is_fused) :]
        self._fused, self._plan = None, None
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        if short:
            rows = _rows(short, device)
            self._fused = FusedRows(layers, rows, max_length=max(segment.end for segment in short))
            parts.append((rows.token_ids.long(), rows.positions.long()))
        if long:
            self._plan = AttentionPlan(
                StepBatch(segments=tuple(long)),
                block_size=layers.cache.shape.block_size,
                group_size=layers.group_size,
                device=device,
            )
            parts.append((self._plan.token_ids, self._plan.positions))
        self._num_fused = sum(len(segment.token_ids) for segment in short)
        self.token_ids, self.positions = (torch.cat(columns) for columns in zip(*parts, strict=True))  # (T,) each
        wanted = list(_wanted(batch.segments, order))
        self.wanted = torch.tensor(wanted, dtype=torch.int64, device=device)

    def attend(self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return `(T, num_heads head_dim)`, see `model.Attend`."""
        cut, parts, layers = self._num_fused, [], self._layers
        if self._fused is not None:
            parts.append(self._fused.attend(layer, query[:cut], key[:cut], value[:cut]))
        if self._plan is not None:
            rest = (query[cut:], key[cut:], value[cut:])
            window = layers.windows[layer]
            parts.append(attend(self._plan, layers.cache, layer, *rest, scale=layers.scale, window=window))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def _rows(segments: Sequence[Segment], device: torch.device) -> DecodeRows:
    batch = StepBatch(segments=tuple(segments))
    max_blocks = max(len(segment.block_table) for segment in segments)
    buffer = torch.empty(buffer_size(batch.num_tokens, max_blocks), dtype=torch.int32)
    fill(batch, batch.num_tokens, max_blocks, 0, buffer)  # block 0 stands behind the shorter tables, and is not read
    return views(buffer.to(device), batch.num_tokens, max_blocks)


def _wanted(segments: Sequence[Segment], order: Sequence[int]) -> Iterator[int]:
    """Yield the rows that want logits, segment by segment, where the segments' rows stand in another order."""
    ends, end = {}, 0
    for place in order:
        end += len(segments[place].token_ids)
        ends[place] = end
    for place, segment in enumerate(segments):
        yield from range(ends[place] - segment.num_logits, ends[place])
