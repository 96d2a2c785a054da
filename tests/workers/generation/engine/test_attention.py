"""Paged attention against a loop over rows, on cases that mix chunks, decodes and drafts of several sequences."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.generation.engine.attention import MAX_SHARED_ROWS, AttentionPlan, attend
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.paged_cache import CacheShape, PagedCache
from workers.generation.engine.protocol import KVPrecision

CPU = torch.device("cpu")
HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS, LAYERS = 8, 8, 64, 2
LAYER = 1


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_cache(num_kv_heads: int, precision: KVPrecision = KVPrecision.FP32) -> PagedCache:
    shape = CacheShape(
        num_layers=LAYERS,
        num_kv_heads=num_kv_heads,
        head_dim=HEAD_DIM,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        precision=precision,
    )
    return PagedCache(shape, CPU)


class Sequences:
    """Random queries, keys and values of some sequences, and where their blocks are."""

    def __init__(self, lengths: Sequence[int], num_heads: int, num_kv_heads: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.queries = [torch.randn(length, num_heads, HEAD_DIM, generator=generator) for length in lengths]
        self.keys = [torch.randn(length, num_kv_heads, HEAD_DIM, generator=generator) for length in lengths]
        self.values = [torch.randn(length, num_kv_heads, HEAD_DIM, generator=generator) for length in lengths]
        blocks = list(range(NUM_BLOCKS))
        random.Random(seed).shuffle(blocks)
        self.tables = [[blocks.pop() for _ in range(-(-length // BLOCK_SIZE))] for length in lengths]

    def run(
        self, cache: PagedCache, pieces: Sequence[tuple[int, int, int]], window: int | None, scale: float = 0.5
    ) -> list[torch.Tensor]:
        """Run pieces (sequence, start, end) in one step and return the rows of each."""
        segments = tuple(
            Segment(token_ids=range(end - start), start=start, block_table=self.tables[number])
            for number, start, end in pieces
        )
        heads = self.queries[0].shape[1] // self.keys[0].shape[1]
        plan = AttentionPlan(StepBatch(segments=segments), block_size=BLOCK_SIZE, group_size=heads, device=CPU)
        query, key, value = (
            torch.cat([parts[number][start:end] for number, start, end in pieces])
            for parts in (self.queries, self.keys, self.values)
        )
        mixed = attend(plan, cache, LAYER, query, key, value, scale=scale, window=window)
        return list(torch.split(mixed, [end - start for _, start, end in pieces]))

    def naive(self, number: int, row: int, window: int | None, scale: float = 0.5) -> torch.Tensor:
        """Return what one row attends to, `(num_heads head_dim,)`."""
        oldest = 0 if window is None else max(0, row - window + 1)
        group = self.queries[number].shape[1] // self.keys[number].shape[1]
        keys = self.keys[number][oldest : row + 1].repeat_interleave(group, dim=1)  # (L, num_heads, head_dim)
        values = self.values[number][oldest : row + 1].repeat_interleave(group, dim=1)
        weights = (torch.einsum("hd,lhd->hl", self.queries[number][row], keys) * scale).softmax(dim=-1)
        return torch.einsum("hl,lhd->hd", weights, values).flatten()


@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("window", [None, 1, 5, 20])
def test_mixed_steps_equal_the_loop_over_rows(num_heads: int, num_kv_heads: int, window: int | None) -> None:
    sequences = Sequences((70, 41, 12, 9, 50), num_heads, num_kv_heads)
    cache = make_cache(num_kv_heads)
    sequences.run(cache, [(0, 0, 66), (1, 0, 3)], window)
    sequences.run(cache, [(3, 0, 8), (2, 0, 9), (4, 0, 30)], window)
    pieces = [(0, 66, 67), (1, 3, 41), (2, 9, 12), (3, 8, 9), (4, 30, 47)]
    for (number, start, _), found in zip(pieces, sequences.run(cache, pieces, window), strict=True):
        for row, ours in enumerate(found):
            torch.testing.assert_close(ours, sequences.naive(number, start + row, window))


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 2 * MAX_SHARED_ROWS)), min_size=1, max_size=6),
    st.sampled_from([None, 1, 7, 16]),
)
def test_any_mixture_of_lengths_equals_the_loop_over_rows(sizes: list[tuple[int, int]], window: int | None) -> None:
    sequences = Sequences([before + new for before, new in sizes], 4, 2)
    cache = make_cache(2)
    if earlier := [(number, 0, before) for number, (before, _) in enumerate(sizes) if before]:
        sequences.run(cache, earlier, window)
    pieces = [(number, before, before + new) for number, (before, new) in enumerate(sizes)]
    for (number, start, end), found in zip(pieces, sequences.run(cache, pieces, window), strict=True):
        torch.testing.assert_close(found[-1], sequences.naive(number, end - 1, window))
        torch.testing.assert_close(found[0], sequences.naive(number, start, window))


@pytest.mark.parametrize(
    ("precision", "tolerance"),
    [(KVPrecision.BF16, 2e-2), (KVPrecision.FP16, 2e-3), (KVPrecision.INT8, 3e-2)],
)
def test_narrow_caches_stay_near_the_loop_in_fp32(precision: KVPrecision, tolerance: float) -> None:
    sequences = Sequences((40, 20), 4, 2)
    cache = make_cache(2, precision)
    sequences.run(cache, [(0, 0, 39), (1, 0, 19)], None)
    for number, found in enumerate(sequences.run(cache, [(0, 39, 40), (1, 19, 20)], None)):
        expected = sequences.naive(number, (39, 19)[number], None)
        assert 0 < float((found[0] - expected).abs().max()) < tolerance


def test_nothing_of_another_sequence_reaches_a_row_not_even_nan() -> None:
    sequences = Sequences((20, 50), 4, 2)
    cache = make_cache(2)
    sequences.run(cache, [(0, 0, 19), (1, 0, 49)], None)
    others = [block for block in range(NUM_BLOCKS) if block not in sequences.tables[0]]
    cache.keys[:, others] = float("nan")
    cache.values[:, others] = float("nan")
    alone, beside = sequences.run(cache, [(0, 19, 20), (1, 49, 50)], None)
    torch.testing.assert_close(alone[0], sequences.naive(0, 19, None))
    assert not torch.isfinite(beside).any()


def test_a_row_is_written_to_its_own_block_and_layer_only() -> None:
    sequences = Sequences((10,), 4, 2)
    cache = make_cache(2)
    sequences.run(cache, [(0, 0, 10)], None)
    assert not cache.keys[0].any() and not cache.values[0].any()
    first, second = sequences.tables[0]
    torch.testing.assert_close(cache.keys[LAYER, first], sequences.keys[0][:8].permute(1, 2, 0))
    torch.testing.assert_close(cache.values[LAYER, second, :, :2], sequences.values[0][8:].transpose(0, 1))
    cache.clear_blocks(sequences.tables[0])
    assert not cache.keys.any() and not cache.values.any()


def test_wanted_rows_are_the_last_of_each_segment_in_order() -> None:
    segments = (
        Segment(token_ids=(5, 6, 7), start=0, block_table=(3,), num_logits=0),
        Segment(token_ids=(8, 9), start=12, block_table=(1, 2), num_logits=2),
        Segment(token_ids=(4, 3, 2), start=7, block_table=(4, 5), num_logits=1),
    )
    plan = AttentionPlan(StepBatch(segments=segments), block_size=8, group_size=1, device=CPU)
    assert plan.token_ids.tolist() == [5, 6, 7, 8, 9, 4, 3, 2]
    assert plan.positions.tolist() == [0, 1, 2, 12, 13, 7, 8, 9]
    assert plan.blocks.tolist() == [3, 3, 3, 2, 2, 4, 5, 5]
    assert plan.offsets.tolist() == [0, 1, 2, 4, 5, 7, 0, 1]
    assert plan.wanted.tolist() == [3, 4, 7]
