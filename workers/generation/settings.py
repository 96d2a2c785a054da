"""The part of the configuration that says how the in-process engine runs."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from workers.generation.engine.protocol import KVPrecision
from workers.generation.engine.settings import Backend, Preemption
from workers.settings_section import Seconds, Section


class LocalSection(Section, frozen=True, kw_only=True):
    """The engine `local`. Meanings: `workers.generation.engine.settings`, and `ops/config/prod.yaml`."""

    backend: Backend = Backend.AUTO
    device: Annotated[str, msgspec.Meta(pattern=r"^(auto|cpu|cuda(:[0-9]+)?)$")] = "auto"
    kv_precision: KVPrecision = KVPrecision.AUTO
    block_size: Literal[8, 16, 32, 64, 128, 256] = 16
    kv_cache_tokens: Annotated[int, msgspec.Meta(ge=64, le=1_000_000_000)] | None = None
    kv_memory_share: Annotated[float, msgspec.Meta(gt=0, le=0.95)] = 0.5
    max_batched_tokens: Annotated[int, msgspec.Meta(ge=16, le=65_536)] = 512
    max_waiting: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 256
    prefix_cache: bool = True
    max_draft: Annotated[int, msgspec.Meta(ge=0, le=64)] = 8
    max_speculative_rows: Annotated[int, msgspec.Meta(ge=1, le=1_024)] = 32
    preemption: Preemption = Preemption.RECOMPUTE
    max_swap_mb: Annotated[int, msgspec.Meta(ge=0, le=1_048_576)] = 1_024
    step_limit_s: Seconds = 60.0
    tensor_parallel: Annotated[int, msgspec.Meta(ge=1, le=64)] = 1
    cuda_graphs: bool = True
    tf32: bool = False
    enable_flash_sdp: bool = True
    enable_mem_efficient_sdp: bool = True
