"""Decode attention over a paged cache in one pass, in Triton's language: no gathered copy of keys and values.

Knows rows and blocks, no sequences: each row has its own block table and length, so that a drafted token is a row like
any other. The invariant: a row's result depends on its own query, blocks and length only. Contexts are cut at multiples
of one length, splits are walked in tiles of fixed size and added in ascending order, whatever else is in the batch.

Products of fp32 are three of TF32, near fp32's digits (Ootomo and Yokota 2022): fused multiply-adds would not fit the
registers. The method is flash-decoding (Dao et al. 2023) with the block tables of Kwon et al. 2023. Importing this
module needs `triton`, which comes with torch's CUDA builds; set TRITON_INTERPRET=1 before it to run on the CPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Compile once, whatever these are in a step: compiling takes a second.
_VARYING, _UNALIGNED = ["window", "table_stride", "num_splits"], ["tables", "lengths", "peaks", "sums"]
MIN_ROWS = 16  # a tensor core multiplies 16 rows at once; the heads of a group fill them up to there


def paged_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    max_length: int,
    scale: float,
    window: int | None = None,
    split: int,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return `(N, num_heads, head_dim)` for `query` of that shape over one layer of a paged cache.

    `keys` `(num_blocks, num_kv_heads, head_dim, block_size)`, `values` with the last two swapped, `key_scales` and
    `value_scales` `(num_blocks, num_kv_heads, block_size)` with 8 bits. Row n attends to the first `lengths[n]`
    positions of the blocks `tables[n]` `(N, max_blocks)`, the last `window` of them where there is a window. Both are
    int32. Lengths are at most `max_length`; it sets the size of the launch, not the result. A length of 0 gives zeros.
    `split` positions are walked by one program, a multiple of 64: results of different splits differ in rounding.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = keys.shape[1], keys.shape[3]
    query = query.contiguous()
    assert keys.is_contiguous() and values.is_contiguous()
    assert tables.dtype == lengths.dtype == torch.int32 and tables.stride(-1) == 1
    num_splits = max(1, triton.cdiv(max_length, split))
    parts = query.new_empty((num_rows, num_heads, num_splits, head_dim), dtype=torch.float32)
    peaks = query.new_empty((2, num_rows, num_heads, num_splits), dtype=torch.float32)  # maxima, then sums
    group, dim = num_heads // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    rows = max(MIN_ROWS, triton.next_power_of_2(group))
    reach = 0 if window is None else window
    _walk_split[(num_rows, num_kv_heads, num_splits)](
        *(query, keys, values, keys if key_scales is None else key_scales),
        *(values if value_scales is None else value_scales, tables, lengths, parts, peaks[0], peaks[1]),
        *(scale, reach, tables.stride(0), num_splits),
        num_kv_heads=num_kv_heads,
        GROUP=group,
        ROWS=rows,
        HEAD_DIM=head_dim,
        DIM=dim,
        BLOCK_SIZE=block_size,
        TILE=tile_size(rows * dim),
        SPLIT=split,
        IS_8_BIT=key_scales is not None,
        DTYPE=_dot_dtype(query.dtype, keys.dtype),
        num_warps=4,
        enable_fp_fusion=True,
    )
    mixed = query.new_empty((num_rows, num_heads, head_dim))
    _add_splits[(num_rows, num_heads)](
        *(parts, peaks[0], peaks[1], lengths, mixed, reach, num_splits),
        num_heads=num_heads,
        HEAD_DIM=head_dim,
        DIM=dim,
        SPLIT=split,
        num_warps=2,
        enable_fp_fusion=True,
    )
    return mixed


def tile_size(numbers: int) -> int:
    """Return the positions of a tile for so many numbers of queries in a program: what registers and memory hold."""
    return 64 if numbers <= 16 * 64 else 32 if numbers <= 16 * 128 else 16


def _dot_dtype(query: torch.dtype, cache: torch.dtype) -> tl.dtype:
    """Return what is multiplied: numbers as they are cached; 8 bits as the query; fp32 where one side is."""
    chosen = torch.float32 if torch.float32 in (query, cache) else query if cache is torch.int8 else cache
    if chosen is torch.bfloat16 and triton.knobs.runtime.interpret:  # there tl.dot takes bf16 for integers
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[chosen]


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _walk_split(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    key_scales: tl.tensor,
    value_scales: tl.tensor,
    tables: tl.tensor,
    lengths: tl.tensor,
    parts: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    scale: tl.tensor,
    window: tl.tensor,
    table_stride: tl.tensor,
    num_splits: tl.tensor,
    num_kv_heads: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    SPLIT: tl.constexpr,
    IS_8_BIT: tl.constexpr,
    DTYPE: tl.constexpr,
) -> None:
    """Attend from the query heads of one key/value head of one row to one split of its context."""
    row, kv_head, split = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    length = tl.load(lengths + row)
    oldest = tl.where(window > 0, tl.maximum(length - window, 0), 0)  # first position in sight
    first = tl.maximum(split * SPLIT, oldest // TILE * TILE)
    last = tl.minimum(split * SPLIT + SPLIT, length)
    if first < last:
        heads, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
        cells = (heads < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]  # (ROWS, DIM)
        rows = (row * num_kv_heads + kv_head) * GROUP + heads
        asked = tl.load(query + rows[:, None] * HEAD_DIM + dims[None, :], mask=cells, other=0.0).to(DTYPE)
        peak = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        mixed = tl.zeros((ROWS, DIM), tl.float32)
        for start in range(first, last, TILE):
            positions = start + tl.arange(0, TILE)
            is_cached = positions < last
            blocks = tl.load(tables + row * table_stride + positions // BLOCK_SIZE, mask=is_cached, other=0)
            pages = blocks.to(tl.int64) * num_kv_heads + kv_head  # (TILE,)
            tile = _load_keys(keys, pages, positions, is_cached, HEAD_DIM, DIM, BLOCK_SIZE)
            scores = tl.dot(asked, tile.to(DTYPE), input_precision="tf32x3") * scale  # (ROWS, TILE)
            slots = pages * BLOCK_SIZE + positions % BLOCK_SIZE
            if IS_8_BIT:
                scores *= tl.load(key_scales + slots, mask=is_cached, other=0.0)[None, :]
            scores = tl.where((is_cached & (positions >= oldest))[None, :], scores, float("-inf"))
            higher = tl.maximum(peak, tl.max(scores, 1))
            shrink, weights = tl.exp(peak - higher), tl.exp(scores - higher[:, None])
            tile = _load_values(values, value_scales, slots, is_cached, HEAD_DIM, DIM, IS_8_BIT).to(DTYPE)
            mixed = mixed * shrink[:, None] + tl.dot(weights.to(DTYPE), tile, input_precision="tf32x3")
            total = total * shrink + tl.sum(weights, 1)
            peak = higher
        targets = rows * num_splits + split
        tl.store(peaks + targets, peak, mask=heads < GROUP)
        tl.store(sums + targets, total, mask=heads < GROUP)
        tl.store(parts + targets[:, None] * HEAD_DIM + dims[None, :], mixed, mask=cells)


@triton.jit
def _load_keys(
    keys: tl.tensor,
    pages: tl.tensor,
    positions: tl.tensor,
    is_cached: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Return `(DIM, TILE)` keys as they are cached; zeros where there is none."""
    dims = tl.arange(0, DIM)[:, None]
    places = (pages * HEAD_DIM * BLOCK_SIZE + positions % BLOCK_SIZE)[None, :] + dims * BLOCK_SIZE
    return tl.load(keys + places, mask=(dims < HEAD_DIM) & is_cached[None, :], other=0.0)


@triton.jit
def _load_values(
    values: tl.tensor,
    scales: tl.tensor,
    slots: tl.tensor,
    is_cached: tl.tensor,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    IS_8_BIT: tl.constexpr,
) -> tl.tensor:
    """Return `(TILE, DIM)` values, with 8 bits times their scales: weights times scales would underflow fp16."""
    dims = tl.arange(0, DIM)[None, :]
    tile = tl.load(values + slots[:, None] * HEAD_DIM + dims, mask=is_cached[:, None] & (dims < HEAD_DIM), other=0.0)
    if IS_8_BIT:
        tile = tile.to(tl.float32) * tl.load(scales + slots, mask=is_cached, other=0.0)[:, None]
    return tile


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_UNALIGNED)
def _add_splits(
    parts: tl.tensor,
    peaks: tl.tensor,
    sums: tl.tensor,
    lengths: tl.tensor,
    mixed: tl.tensor,
    window: tl.tensor,
    num_splits: tl.tensor,
    num_heads: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLIT: tl.constexpr,
) -> None:
    """Add the splits of one head of one row, in ascending order."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dims = tl.arange(0, DIM)
    length = tl.load(lengths + row)
    oldest = tl.where(window > 0, tl.maximum(length - window, 0), 0)
    base = (row * num_heads + head) * num_splits
    peak = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    summed = tl.zeros((DIM,), tl.float32)
    for split in range(oldest // SPLIT, tl.cdiv(length, SPLIT)):
        theirs = tl.load(peaks + base + split)
        higher = tl.maximum(peak, theirs)
        shrink, factor = tl.exp(peak - higher), tl.exp(theirs - higher)
        part = tl.load(parts + (base + split) * HEAD_DIM + dims, mask=dims < HEAD_DIM, other=0.0)
        summed = summed * shrink + part * factor
        total = total * shrink + tl.load(sums + base + split) * factor
        peak = higher
    result = summed / tl.where(length > 0, total, 1.0)
    place = (row * num_heads + head) * HEAD_DIM + dims
    tl.store(mixed + place, result.to(mixed.dtype.element_ty), mask=dims < HEAD_DIM)
