from __future__ import annotations

import pytest
import torch

from workers.generation.engine.cuda_memory import (
    allocator_slack_bytes,
    returning_memory,
)
from workers.generation.engine.memory import free_bytes
from workers.generation.engine.paged_cache import CacheShape, PagedCache
from workers.generation.engine.protocol import KVPrecision

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, needs_cuda])]


def filled_cache(device: str, precision: KVPrecision) -> PagedCache:
    shape = CacheShape(num_layers=2, num_kv_heads=2, head_dim=8, num_blocks=6, block_size=4, precision=precision)
    cache = PagedCache(shape, torch.device(device))
    for tensor in cache.tensors():
        tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape) % 100)
    return cache


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("precision", [KVPrecision.BF16, KVPrecision.INT8])
def test_swapped_blocks_come_back_bit_for_bit_to_other_places(device: str, precision: KVPrecision) -> None:
    cache = filled_cache(device, precision)
    before = [tensor.clone() for tensor in cache.tensors()]
    content = cache.read_blocks([4, 1])
    cache.clear_blocks([4, 1, 0, 5])
    cache.write_blocks([0, 5], content)
    for tensor, old in zip(cache.tensors(), before, strict=True):
        assert torch.equal(tensor[:, [0, 5]], old[:, [4, 1]])
        assert not tensor[:, [4, 1]].any()
        assert torch.equal(tensor[:, [2, 3]], old[:, [2, 3]])


@pytest.mark.parametrize("device", DEVICES)
def test_swapped_blocks_are_copies(device: str) -> None:
    cache = filled_cache(device, KVPrecision.FP32)
    content = cache.read_blocks([3])
    kept = [part.clone() for part in content]
    cache.clear_blocks([3])
    assert all(torch.equal(part, old) for part, old in zip(content, kept, strict=True))
    assert all(part.is_pinned() == (device == "cuda") for part in content)


def test_other_devices_tell_nothing_of_their_allocator() -> None:
    assert allocator_slack_bytes(torch.device("cpu")) == 0


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED")]
)
def test_exhaustion_is_one_error(error: RuntimeError) -> None:
    with pytest.raises(torch.OutOfMemoryError), returning_memory():
        raise error


def test_other_errors_pass_on_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes") as caught, returning_memory():
        raise RuntimeError("shapes differ")
    assert not isinstance(caught.value, torch.OutOfMemoryError)


@pytest.mark.gpu
@needs_cuda
def test_step_that_is_too_large_leaves_no_cached_memory_and_a_smaller_one_runs() -> None:
    device = torch.device("cuda")
    kept = torch.empty(1 << 26, dtype=torch.uint8, device=device)
    del kept
    assert allocator_slack_bytes(device) >= 1 << 26
    with pytest.raises(torch.OutOfMemoryError), returning_memory():
        torch.empty(2 * free_bytes(device), dtype=torch.uint8, device=device)
    assert allocator_slack_bytes(device) < 1 << 26
    assert torch.zeros(8, device=device).sum() == 0
