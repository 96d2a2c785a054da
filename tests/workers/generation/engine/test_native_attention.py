"""Attention in C++ against torch's over an equal cache, and its bits in any company."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.generation.engine import native_attention
from workers.generation.engine.attention import AttentionPlan, attend
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.kernels import load_library
from workers.generation.engine.native_attention import NativeAttention, can_attend, find_parallel
from workers.generation.engine.paged_cache import CacheShape, PagedCache
from workers.generation.engine.protocol import KVPrecision

CPU = torch.device("cpu")
NUM_BLOCKS, BLOCK_SIZE, HEAD_DIM, LAYER = 80, 8, 16, 1
WINDOWS = (None, None, 5, 150)
LENGTHS = (300, 41, 12, 1, 130)
PIECES = ((0, 290, 300), (1, 40, 41), (2, 0, 12), (3, 0, 1), (4, 100, 130))
DECODES = tuple((number, length - 1, length) for number, length in enumerate(LENGTHS))
Rows = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_cache(precision: KVPrecision = KVPrecision.FP32, num_kv_heads: int = 2) -> PagedCache:
    return PagedCache(
        CacheShape(
            num_layers=len(WINDOWS),
            num_kv_heads=num_kv_heads,
            head_dim=HEAD_DIM,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            precision=precision,
        ),
        CPU,
    )


def make_native(cache: PagedCache, *, group_size: int = 3, num_threads: int = 2) -> NativeAttention:
    library = load_library()
    if library is None:
        pytest.skip("no kernels for this machine")
    return NativeAttention(library, cache, group_size=group_size, windows=WINDOWS, num_threads=num_threads)


def random_rows(lengths: Sequence[int], num_kv_heads: int = 2, group_size: int = 3) -> list[Rows]:
    """Return queries, keys and values of some sequences; side by side in memory, as one product leaves them."""
    generator = torch.Generator().manual_seed(4)
    heads = [group_size * num_kv_heads, num_kv_heads, num_kv_heads]
    found = []
    for length in lengths:
        joined = torch.randn(length, sum(heads), HEAD_DIM, generator=generator)
        query, key, value = torch.split(joined, heads, dim=1)
        found.append((query, key, value))
    return found


def make_batch(rows: Sequence[Rows], pieces: Sequence[tuple[int, int, int]]) -> StepBatch:
    blocks = random.Random(2).sample(range(NUM_BLOCKS), NUM_BLOCKS)
    tables = [[blocks.pop() for _ in range(-(-len(query) // BLOCK_SIZE))] for query, _, _ in rows]
    return StepBatch(
        segments=tuple(
            Segment(token_ids=range(end - start), start=start, block_table=tables[number])
            for number, start, end in pieces
        )
    )


def gather(rows: Sequence[Rows], pieces: Sequence[tuple[int, int, int]]) -> Rows:
    query, key, value = (torch.cat([rows[n][part][start:end] for n, start, end in pieces]) for part in range(3))
    return query, key, value


def run_native(
    native: NativeAttention, rows: Sequence[Rows], *steps: Sequence[tuple[int, int, int]], layer: int = LAYER
) -> torch.Tensor:
    """Run steps of pieces (sequence, start, end) and return the rows of the last one."""
    for pieces in steps:
        native.begin(make_batch(rows, pieces))
        mixed = native.attend(layer, *gather(rows, pieces), 0.3)
    return mixed


def run_torch(
    cache: PagedCache, rows: Sequence[Rows], *steps: Sequence[tuple[int, int, int]], layer: int = LAYER
) -> torch.Tensor:
    group_size = rows[0][0].shape[1] // rows[0][1].shape[1]
    for pieces in steps:
        plan = AttentionPlan(make_batch(rows, pieces), block_size=BLOCK_SIZE, group_size=group_size, device=CPU)
        query, key, value = gather(rows, pieces)
        mixed = attend(plan, cache, layer, query, key, value, scale=0.3, window=WINDOWS[layer])
    return mixed.view(query.shape)


def before(pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    return [(number, 0, start) for number, start, _ in pieces if start]


@pytest.mark.parametrize("precision", [KVPrecision.FP32, KVPrecision.BF16, KVPrecision.FP16, KVPrecision.INT8])
@pytest.mark.parametrize("layer", range(len(WINDOWS)))
@pytest.mark.parametrize("pieces", [PIECES, DECODES])
def test_a_step_equals_torchs_and_leaves_the_same_cache(
    precision: KVPrecision, layer: int, pieces: Sequence[tuple[int, int, int]]
) -> None:
    ours, theirs = make_cache(precision), make_cache(precision)
    rows = random_rows(LENGTHS)
    found = run_native(make_native(ours), rows, before(pieces), pieces, layer=layer)
    wanted = run_torch(theirs, rows, before(pieces), pieces, layer=layer)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)
    for own, other in zip(ours.tensors(), theirs.tensors(), strict=True):
        assert own.any()
        assert torch.equal(own, other)


@pytest.mark.parametrize(("group_size", "num_kv_heads"), [(1, 12), (1, 1), (8, 1), (60, 1)])
def test_any_groups_of_heads_equal_torch(group_size: int, num_kv_heads: int) -> None:
    rows = random_rows(LENGTHS, num_kv_heads, group_size)
    native = make_native(make_cache(num_kv_heads=num_kv_heads), group_size=group_size)
    wanted = run_torch(make_cache(num_kv_heads=num_kv_heads), rows, before(PIECES), PIECES)
    torch.testing.assert_close(run_native(native, rows, before(PIECES), PIECES), wanted, atol=1e-5, rtol=1e-4)


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40)), min_size=1, max_size=4),
    st.sampled_from(range(len(WINDOWS))),
    st.integers(1, 3),
)
def test_a_row_has_the_same_bits_in_any_company(sizes: list[tuple[int, int]], layer: int, num_threads: int) -> None:
    pieces = [(number, start, start + new) for number, (start, new) in enumerate(sizes)]
    rows = random_rows([130] * len(sizes))
    native = make_native(make_cache(), num_threads=num_threads)
    alone = [
        run_native(make_native(make_cache(), num_threads=1), rows, [(number, 0, end)], layer=layer)[start:]
        for number, start, end in pieces
    ]
    steps = [before(pieces), pieces] if before(pieces) else [pieces]
    assert torch.equal(run_native(native, rows, *steps, layer=layer), torch.cat(alone))


@pytest.mark.parametrize("num_threads", [1, 2, 5])
def test_threads_of_its_own_give_what_lent_ones_give(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = random_rows(LENGTHS)
    lent = run_native(make_native(make_cache(), num_threads=num_threads), rows, before(PIECES), PIECES)
    monkeypatch.setattr(native_attention, "find_parallel", lambda: None)
    own = make_native(make_cache(), num_threads=num_threads)
    assert torch.equal(run_native(own, rows, before(PIECES), PIECES), lent)
    own.close()
    own.close()


def test_torchs_threads_are_found_on_linux() -> None:
    if "OpenMP" not in torch.__config__.parallel_info().split("ATen parallel backend:")[-1]:
        pytest.skip("torch has no OpenMP here")
    assert find_parallel()


def test_half_precision_rows_are_attended_in_fp32_and_returned_in_their_own() -> None:
    rows = [(query.bfloat16(), key.bfloat16(), value.bfloat16()) for query, key, value in random_rows(LENGTHS)]
    wide = [(query.float(), key.float(), value.float()) for query, key, value in rows]
    found = run_native(make_native(make_cache()), rows, before(PIECES), PIECES)
    wanted = run_native(make_native(make_cache()), wide, before(PIECES), PIECES)
    assert torch.equal(found, wanted.bfloat16())


@pytest.mark.parametrize(
    ("segment", "reason"),
    [
        (Segment(token_ids=(1,), start=8, block_table=(3,)), "block table"),
        (Segment(token_ids=(1,), start=0, block_table=(NUM_BLOCKS,)), "outside the cache"),
        (Segment(token_ids=(1,), start=-1, block_table=(3,)), "position"),
        (Segment(token_ids=(), start=1, block_table=(3,)), "contradict"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(segment: Segment, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        make_native(make_cache()).begin(StepBatch(segments=(segment,)))


def test_heads_and_blocks_that_fill_no_vector_are_left_to_torch() -> None:
    def shape(head_dim: int, block_size: int) -> CacheShape:
        return CacheShape(
            num_layers=1,
            num_kv_heads=1,
            head_dim=head_dim,
            num_blocks=1,
            block_size=block_size,
            precision=KVPrecision.FP32,
        )

    assert can_attend(shape(80, 16), CPU)
    assert not can_attend(shape(12, 16), CPU)
    assert not can_attend(shape(16, 12), CPU)
    assert not can_attend(shape(16, 16), torch.device("meta"))
