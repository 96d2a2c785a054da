from __future__ import annotations

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workers.generation.engine.paged_cache import (
    CacheShape,
    PagedCache,
    quantize_kv,
    resolve_kv_precision,
)
from workers.generation.engine.protocol import KVPrecision, Precision

KINDS = [kind for kind in KVPrecision if kind is not KVPrecision.AUTO]


def shape(precision: KVPrecision) -> CacheShape:
    return CacheShape(num_layers=3, num_kv_heads=2, head_dim=4, num_blocks=5, block_size=8, precision=precision)


def filled(precision: KVPrecision) -> PagedCache:
    cache = PagedCache(shape(precision), torch.device("cpu"))
    for tensor in cache.tensors():
        tensor.copy_(torch.randint(1, 100, tensor.shape))
    return cache


@pytest.mark.parametrize("precision", KINDS)
def test_bytes_of_a_block_are_those_of_its_tensors(precision: KVPrecision) -> None:
    cache = PagedCache(shape(precision), torch.device("cpu"))
    assert sum(tensor.nbytes for tensor in cache.tensors()) == 5 * cache.shape.bytes_per_block
    assert not any(tensor.any() for tensor in cache.tensors())


@pytest.mark.parametrize("precision", KINDS)
def test_copies_and_clears_reach_all_layers_and_no_other_block(precision: KVPrecision) -> None:
    cache = filled(precision)
    before = [tensor.clone() for tensor in cache.tensors()]
    cache.copy_block(1, 3)
    cache.clear_blocks([0])
    for tensor, old in zip(cache.tensors(), before, strict=True):
        assert torch.equal(tensor[:, 3], old[:, 1])
        assert not tensor[:, 0].any()
        assert torch.equal(tensor[:, [1, 2, 4]], old[:, [1, 2, 4]])


@pytest.mark.parametrize("precision", KINDS)
def test_what_was_read_is_no_view_and_is_put_back_bit_for_bit(precision: KVPrecision) -> None:
    cache = filled(precision)
    before = [tensor.clone() for tensor in cache.tensors()]
    content = cache.read_blocks([4, 1])
    cache.clear_blocks([1, 4])
    cache.write_blocks([0, 2], content)
    for tensor, old in zip(cache.tensors(), before, strict=True):
        assert torch.equal(tensor[:, [0, 2]], old[:, [4, 1]])


def test_layouts_differ_wherever_a_block_means_other_numbers() -> None:
    layouts = {shape(kind).layout("model").identity for kind in KINDS}
    assert len({*layouts, shape(KINDS[0]).layout("other").identity}) == len(KINDS) + 1


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-1e4, 1e4, width=32), min_size=4, max_size=4))
def test_8_bits_keep_each_number_within_half_a_step(numbers: list[float]) -> None:
    row = torch.tensor(numbers)
    values, scales = quantize_kv(row)
    assert float((values.float() * scales - row).abs().max()) <= 0.5001 * float(scales) + 1e-30
    largest = float(row.abs().max())
    assert scales > 0 if largest > 1e-30 else largest > 0 or scales == 0  # a 127th of the smallest floats is 0


def test_auto_follows_the_weights() -> None:
    found = {kind: resolve_kv_precision(KVPrecision.AUTO, kind) for kind in Precision}
    assert found[Precision.FP32] is KVPrecision.FP32
    assert found[Precision.BF16] is KVPrecision.BF16
    assert {found[kind] for kind in (Precision.FP16, Precision.INT8, Precision.FP8)} == {KVPrecision.FP16}
    assert resolve_kv_precision(KVPrecision.INT8, Precision.FP32) is KVPrecision.INT8


def test_a_cache_on_the_cpu_takes_no_memory_before_it_is_written() -> None:
    shape = CacheShape(
        num_layers=4, num_kv_heads=2, head_dim=64, num_blocks=8_192, block_size=16, precision=KVPrecision.FP32
    )
    before = psutil.Process().memory_info().rss
    cache = PagedCache(shape, torch.device("cpu"))
    assert psutil.Process().memory_info().rss - before < shape.num_blocks * shape.bytes_per_block // 8
    assert not cache.keys[3, 8_191].any()
    cache.values[3, 5] = 1
    assert cache.values.sum() == 2 * 64 * 16
