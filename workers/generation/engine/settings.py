"""How the in-process engine runs: its bounds, its number formats, and what it runs on.

Plain values, without torch: whoever reads a configuration may import this. `loader` says whether a machine can do it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from workers.generation.engine.protocol import KVPrecision, Precision


class Backend(StrEnum):
    """What runs the model."""

    AUTO = "auto"
    """The fastest that can run it here."""
    NATIVE = "native"
    """Own C++ kernels on the CPU, for the Llama family."""
    TORCH = "torch"
    """Own model in torch, for the Llama family on CPU and CUDA."""
    TRANSFORMERS = "transformers"
    """Any causal model that the transformers library knows."""


class Preemption(StrEnum):
    """What becomes of the cache of a sequence that has to make room."""

    RECOMPUTE = "recompute"
    """It is dropped, and read again later."""
    SWAP = "swap"
    """It is moved to host memory, and back later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEngineSettings:
    """Bounds and numbers of the in-process engine.

    `max_context` is lowered to what the model knows. `max_batched_tokens` bounds the tokens of one step, and so how
    long a prompt holds up running answers. `kv_cache_tokens` are the positions that the cache holds; None takes
    max_sequences times max_context, or what fits into `kv_memory_share` of the memory that is free once the weights
    stand. `memory_limit_bytes` is what the process may use, if the machine does not say so itself. `max_draft` are the
    tokens that prompt look-up may guess ahead of each sequence, 0 for none, while a step has fewer rows than
    `max_speculative_rows`. `max_swap_bytes` bounds what preemption moves to host memory. `device` is `auto`, `cpu` or a
    CUDA device of torch. `step_limit_s`: an engine that makes no step for so long counts as dead. The three last flags
    are torch's, of CUDA.
    """

    max_sequences: int = 32
    max_context: int = 2_048
    max_waiting: int = 256
    max_batched_tokens: int = 512
    block_size: int = 16
    kv_cache_tokens: int | None = None
    kv_memory_share: float = 0.5
    memory_limit_bytes: int | None = None
    prefix_cache: bool = True
    max_draft: int = 8
    max_speculative_rows: int = 32
    preemption: Preemption = Preemption.RECOMPUTE
    max_swap_bytes: int = 1 << 30
    precision: Precision = Precision.FP32
    kv_precision: KVPrecision = KVPrecision.AUTO
    backend: Backend = Backend.AUTO
    device: str = "auto"
    num_threads: int | None = None
    tensor_parallel: int = 1
    step_limit_s: float = 60.0
    model_name: str = ""
    cuda_graphs: bool = True
    tf32: bool = False
    enable_flash_sdp: bool = True
    enable_mem_efficient_sdp: bool = True
