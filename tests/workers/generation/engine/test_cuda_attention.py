from __future__ import annotations

import pytest
import torch

from workers.generation.engine.cuda_attention import find_paged_attention, try_paged_attention
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import KVPrecision

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CPU = torch.device("cpu")


def shape(precision: KVPrecision) -> CacheShape:
    return CacheShape(num_layers=3, num_kv_heads=2, head_dim=16, num_blocks=9, block_size=16, precision=precision)


def plain(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    max_length: int,
    scale: float,
    split: int,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> torch.Tensor:
    """Attend over the whole context of the one row."""
    wide = values.float() if value_scales is None else values.float() * value_scales[..., None]
    seen = torch.cat([wide[block] for block in tables[0].tolist()], dim=1)[:, :max_length]  # (kv, context, head_dim)
    return seen.mean(1).repeat_interleave(query.shape[1] // len(seen), 0)[None].to(query.dtype)


@pytest.mark.parametrize("precision", [KVPrecision.FP32, KVPrecision.INT8])
def test_right_kernel_passes_its_trial(precision: KVPrecision) -> None:
    assert try_paged_attention(plain, shape(precision), 3, torch.float32, 256, CPU) == ""


def test_wrong_kernel_is_found_out() -> None:
    def wrong(query: torch.Tensor, *_: torch.Tensor, **__: object) -> torch.Tensor:
        return torch.ones_like(query)

    assert "off by" in try_paged_attention(wrong, shape(KVPrecision.FP32), 3, torch.float32, 256, CPU)


def test_nan_is_found_out() -> None:
    def broken(query: torch.Tensor, *_: torch.Tensor, **__: object) -> torch.Tensor:
        return query * float("nan")

    assert "off by" in try_paged_attention(broken, shape(KVPrecision.FP32), 3, torch.float32, 256, CPU)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_there_is_none() -> None:
    assert find_paged_attention(shape(KVPrecision.FP32), 3, torch.float32, split=256) is None


@pytest.mark.gpu
@needs_cuda
@pytest.mark.parametrize("precision", [KVPrecision.FP32, KVPrecision.BF16, KVPrecision.FP16, KVPrecision.INT8])
def test_device_runs_the_fused_attention(precision: KVPrecision) -> None:
    dtype = torch.float32 if precision is KVPrecision.FP32 else torch.bfloat16
    assert find_paged_attention(shape(precision), 3, dtype, split=256) is not None
