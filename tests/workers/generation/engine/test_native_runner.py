"""The native forward pass against a naive one, in every number format and with every optional part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import cast

import pytest
import torch

from tests.workers.generation.engine.native_reference import (
    MAX_CONTEXT,
    TINY,
    Formats,
    RandomSource,
    changed,
    make_runner,
    naive_logits,
    prompt_segment,
    random_ids,
    run_in_chunks,
)
from workers.generation.engine.batch import Segment, StepBatch
from workers.generation.engine.config import ModelConfig
from workers.generation.engine.paged_cache import quantize_kv
from workers.generation.engine.protocol import KVPrecision, Precision
from workers.generation.engine.weight_source import LayerWeights

PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8)
KV_PRECISIONS = (KVPrecision.FP32, KVPrecision.BF16, KVPrecision.FP16, KVPrecision.INT8)
ALL_PARTS = {"has_qkv_bias": True, "has_out_bias": True, "has_mlp_bias": True, "has_head_norms": True}
BLOCKS = tuple(range(1, 60))
# A number on the edge between two steps of a coarse cache may fall on either side, which moves some logits.
TOLERANCES = {KVPrecision.FP32: 2e-4, KVPrecision.FP16: 3e-3, KVPrecision.BF16: 3e-2, KVPrecision.INT8: 1e-1}
# So may a number of a row that is rounded to 7 bits, and later tokens read what it leaves in the cache. The products by
# themselves are compared below.
PRODUCT_TOLERANCES = {Precision.INT8: 6e-1}


def check(config: ModelConfig, formats: Formats, *, length: int = 45, block_size: int = 16, blocks: int = 60) -> None:
    """Compare a prompt, then decoding steps, with the naive pass."""
    source = RandomSource(config)
    ids = random_ids(length, vocab_size=config.vocab_size)
    runner = make_runner(source, formats, block_size=block_size, num_blocks=blocks)
    given = run_in_chunks(runner, ids, range(blocks - 1, 0, -1), (length - 3, 1))
    wanted = naive_logits(source, formats, ids)
    assert wanted.std() > 0.5  # else any small number would pass
    tolerance = max(TOLERANCES[formats.cache], PRODUCT_TOLERANCES.get(formats.weights, 0.0))
    torch.testing.assert_close(given, wanted, atol=tolerance, rtol=1e-4)
    assert (given - wanted).abs().mean() < tolerance / 10


@pytest.mark.parametrize(("weights", "cache"), [*product(PRECISIONS, KV_PRECISIONS)])
def test_every_number_format_equals_the_naive_pass(weights: Precision, cache: KVPrecision) -> None:
    check(TINY, Formats(weights, cache))


@pytest.mark.parametrize("cache", KV_PRECISIONS)
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 4), (6, 2), (9, 3), (5, 1), (64, 1)])
def test_every_grouping_of_heads_equals_the_naive_pass(num_heads: int, num_kv_heads: int, cache: KVPrecision) -> None:
    check(changed(num_heads=num_heads, num_kv_heads=num_kv_heads), Formats(cache=cache))


@pytest.mark.parametrize("cache", KV_PRECISIONS)
@pytest.mark.parametrize("head_dim", [16, 24, 32, 40, 64, 72, 128])
def test_every_head_dim_equals_the_naive_pass(head_dim: int, cache: KVPrecision) -> None:
    check(changed(head_dim=head_dim), Formats(cache=cache))


@pytest.mark.parametrize("cache", KV_PRECISIONS)
@pytest.mark.parametrize("block_size", [8, 16, 24, 32, 256])
def test_every_block_size_equals_the_naive_pass(block_size: int, cache: KVPrecision) -> None:
    check(TINY, Formats(cache=cache), length=300, block_size=block_size)


@pytest.mark.parametrize("cache", KV_PRECISIONS)
@pytest.mark.parametrize("window", [1, 2, 17, 128, 130])
def test_a_window_hides_what_is_further_back(window: int, cache: KVPrecision) -> None:
    check(changed(windows=(window, None)), Formats(cache=cache), length=300)


@pytest.mark.parametrize("weights", PRECISIONS)
def test_every_optional_part_equals_the_naive_pass(weights: Precision) -> None:
    check(changed(is_tied=False, windows=(5, 9), **ALL_PARTS), Formats(weights))


@pytest.mark.parametrize("part", ALL_PARTS)
def test_each_optional_part_changes_the_result_as_the_naive_pass_says(part: str) -> None:
    check(changed(**{part: True}), Formats())


@pytest.mark.parametrize("weights", PRECISIONS)
@pytest.mark.parametrize(
    ("hidden", "wide", "vocab"), [(1, 1, 1), (7, 5, 3), (63, 65, 17), (64, 128, 16), (129, 31, 33)]
)
def test_odd_sizes_equal_the_naive_pass(hidden: int, wide: int, vocab: int, weights: Precision) -> None:
    config = changed(hidden_size=hidden, intermediate_size=wide, vocab_size=vocab)
    source, formats = RandomSource(config), Formats(weights)
    ids = random_ids(20, vocab_size=vocab)
    given = run_in_chunks(make_runner(source, formats), ids, BLOCKS, (20,))
    tolerance = PRODUCT_TOLERANCES.get(weights, 2e-3)
    torch.testing.assert_close(given, naive_logits(source, formats, ids), atol=tolerance, rtol=1e-3)


class HeadAlone(RandomSource):
    """A model whose layer adds nothing: its logits are one product."""

    def layer(self, number: int) -> LayerWeights:
        layer = super().layer(number)
        return replace(layer, out=torch.zeros_like(layer.out), down=torch.zeros_like(layer.down))


@pytest.mark.parametrize("hidden", [1, 7, 63, 64, 65, 200, 1_500])
def test_a_product_in_8_bits_is_that_of_the_rounded_numbers(hidden: int) -> None:
    config = changed(hidden_size=hidden, vocab_size=70, num_layers=1, windows=(None,), is_tied=False)
    source, formats = HeadAlone(config), Formats(Precision.INT8)
    ids = random_ids(70, vocab_size=70)
    given = run_in_chunks(make_runner(source, formats), ids, BLOCKS, (1, 2, 5, 6, 7, 49))
    torch.testing.assert_close(given, naive_logits(source, formats, ids), atol=1e-3, rtol=1e-4)


class OneBadToken(HeadAlone):
    """A model whose token 3 has a number that is not finite."""

    def __init__(self, config: ModelConfig, bad: float) -> None:
        super().__init__(config)
        self._bad = bad

    def embedding(self) -> torch.Tensor:
        table = super().embedding()
        table[3, 5] = self._bad
        return table


@pytest.mark.parametrize("weights", PRECISIONS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_so_in_its_row_and_harms_no_other(bad: float, weights: Precision) -> None:
    config = changed(num_layers=1, windows=(None,), is_tied=False)
    ids = ((1, 2), (3,), (2, 1))
    segments = tuple(prompt_segment(each, (place,)) for place, each in enumerate(ids))
    rows = make_runner(OneBadToken(config, bad), Formats(weights)).forward(StepBatch(segments=segments))
    wanted = make_runner(HeadAlone(config), Formats(weights)).forward(StepBatch(segments=segments))
    assert not rows[2].isfinite().any()
    assert torch.equal(rows[[0, 1, 3, 4]], wanted[[0, 1, 3, 4]])


def test_the_whole_context_can_be_used() -> None:
    check(TINY, Formats(), length=MAX_CONTEXT)


def test_only_the_wanted_rows_have_logits() -> None:
    runner = make_runner(RandomSource(TINY))
    ids = random_ids(30)
    whole = runner.forward(StepBatch(segments=(prompt_segment(ids, BLOCKS),)))
    for num_logits in (1, 2, 29):
        part = runner.forward(StepBatch(segments=(prompt_segment(ids, BLOCKS, num_logits=num_logits),)))
        assert torch.equal(part, whole[-num_logits:])


def test_a_chunk_without_logits_fills_the_cache() -> None:
    runner = make_runner(RandomSource(TINY))
    ids = random_ids(30)
    whole = runner.forward(StepBatch(segments=(prompt_segment(ids, BLOCKS),)))
    runner.cache.clear_blocks(BLOCKS)
    none = runner.forward(StepBatch(segments=(prompt_segment(ids[:29], BLOCKS, num_logits=0),)))
    last = Segment(token_ids=ids[29:], start=29, block_table=BLOCKS)
    assert none.shape == (0, TINY.vocab_size)
    assert torch.equal(runner.forward(StepBatch(segments=(last,))), whole[-1:])


def test_an_empty_batch_has_no_logits() -> None:
    assert make_runner(RandomSource(TINY)).forward(StepBatch(segments=())).shape == (0, TINY.vocab_size)


def cache_after(cache: KVPrecision) -> Sequence[torch.Tensor]:
    """Return what a prompt leaves in its blocks."""
    runner = make_runner(RandomSource(TINY), Formats(cache=cache))
    runner.forward(StepBatch(segments=(prompt_segment(random_ids(40), (4, 9, 2)),)))
    return cast(Sequence[torch.Tensor], runner.cache.read_blocks((4, 9, 2)))


def test_eight_bit_values_in_the_cache_are_those_of_quantize_kv() -> None:
    exact_keys, exact_values = cache_after(KVPrecision.FP32)
    keys, values, key_scales, value_scales = cache_after(KVPrecision.INT8)
    for exact, quantized, scales in (
        (exact_keys.transpose(-1, -2), keys.transpose(-1, -2), key_scales),
        (exact_values, values, value_scales),
    ):
        wanted, wanted_scales = quantize_kv(exact[0])  # the first layer reads nothing of the cache
        assert torch.equal(quantized[0], wanted)
        assert torch.equal(scales[0], wanted_scales)


@pytest.mark.parametrize("cache", [KVPrecision.BF16, KVPrecision.FP16])
def test_half_width_numbers_in_the_cache_are_rounded_as_torch_does(cache: KVPrecision) -> None:
    for exact, rounded in zip(cache_after(KVPrecision.FP32), cache_after(cache), strict=True):
        assert torch.equal(exact[0].to(rounded.dtype), rounded[0])
