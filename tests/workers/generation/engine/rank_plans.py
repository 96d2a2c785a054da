"""Plans of tensor-parallel ranks over the tiny models of `test_model`."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.workers.generation.engine.test_model import BLOCK_SIZE, NUM_BLOCKS
from workers.generation.engine.config import read_config
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import KVPrecision, Precision
from workers.generation.engine.tensor_parallel_rank import RankPlan
from workers.generation.engine.weights import SafetensorsSource


def make_plan(
    folder: Path,
    *,
    size: int = 2,
    precision: Precision = Precision.FP32,
    start_s: float = 90.0,
    timeout_s: float = 30.0,
) -> RankPlan:
    """Return the plan for a folder, with a cache like that of `make_runner`."""
    config = read_config(folder)
    shape = CacheShape(
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        precision=KVPrecision.FP32,
    )
    return RankPlan(
        size=size,
        open_source=partial(SafetensorsSource, folder, config),
        shape=shape,
        precision=precision,
        max_context=256,
        device_type="cpu",
        num_threads=1,
        start_s=start_s,
        timeout_s=timeout_s,
    )
