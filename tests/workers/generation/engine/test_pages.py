from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from workers.generation.engine.pages import MIN_BYTES, empty, page_zeros, return_freed

SIZE = 64 << 20


def resident_bytes() -> int:
    return int(psutil.Process().memory_info().rss)


def test_pages_are_zeros_that_take_no_memory_until_they_are_written_and_none_afterwards() -> None:
    before = resident_bytes()
    tensor = page_zeros((SIZE // 8, 2), torch.float32)
    assert tensor.shape == (SIZE // 8, 2) and not tensor[-1].any()
    assert resident_bytes() - before < SIZE // 4
    tensor.fill_(1)
    assert resident_bytes() - before > SIZE // 2
    del tensor
    assert resident_bytes() - before < SIZE // 4


def test_small_tensors_are_the_allocators_and_large_ones_pages() -> None:
    for count in (0, 1, MIN_BYTES // 2 - 1, MIN_BYTES // 2):
        tensor = empty((count, 1), torch.float16)
        assert tensor.shape == (count, 1) and tensor.is_contiguous()
        assert tensor.fill_(3).sum(dtype=torch.float32) == 3 * count


def test_what_cannot_be_mapped_is_out_of_memory() -> None:
    for size in (1 << 60, 1 << 64):
        with pytest.raises(MemoryError, match="cannot be mapped"):
            page_zeros((size,), torch.int8)


@pytest.mark.skipif(not Path("/lib/x86_64-linux-gnu/libc.so.6").exists(), reason="glibc keeps freed memory")
def test_freed_memory_between_what_is_used_goes_back() -> None:
    parts = [torch.ones(1 << 14) for _ in range(SIZE >> 16)]
    kept = parts[::64]
    full = resident_bytes()
    del parts
    return_freed()
    assert full - resident_bytes() > SIZE // 2
    assert all(part[0] == 1 for part in kept)
