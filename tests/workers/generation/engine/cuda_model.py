"""A tiny model on a runner for CUDA, and the same on the reference runner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from tests.workers.generation.engine.greedy import run_greedy
from tests.workers.generation.engine.native_reference import TINY, RandomSource
from workers.generation.engine.batch import ModelRunner
from workers.generation.engine.cuda_attention import PagedAttention
from workers.generation.engine.cuda_graph import Recorder, Step
from workers.generation.engine.cuda_runner import CudaRunner, make_cuda_runner
from workers.generation.engine.model import LlamaModel
from workers.generation.engine.model_runner import TorchRunner
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import KVPrecision, Precision
from workers.generation.engine.settings import LocalEngineSettings

NUM_BLOCKS, BLOCK_SIZE, MAX_CONTEXT, NUM_TOKENS = 48, 16, 128, 8
WINDOWED = replace(TINY, windows=(None, 9))
PROMPTS = [
    tuple((7 * place + number) % TINY.vocab_size for place in range(length))
    for number, length in enumerate((1, 4, 16, 17, 33, 50))
]
CPU = torch.device("cpu")


def model(precision: Precision = Precision.FP32, device: torch.device = CPU) -> LlamaModel:
    return LlamaModel(RandomSource(WINDOWED), precision=precision, device=device, max_context=MAX_CONTEXT)


def shape(precision: KVPrecision = KVPrecision.FP32) -> CacheShape:
    return CacheShape(
        num_layers=TINY.num_layers,
        num_kv_heads=TINY.num_kv_heads,
        head_dim=TINY.head_dim,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        precision=precision,
    )


def reference(precision: KVPrecision = KVPrecision.FP32) -> TorchRunner:
    return TorchRunner(model(), shape(precision), identity="tiny")


def on_cpu(
    kernel: PagedAttention | None,
    recorder: Recorder | None,
    precision: KVPrecision = KVPrecision.FP32,
    *,
    max_rows: int = 24,
) -> CudaRunner:
    """Return the runner for CUDA on the CPU, with whatever stands for the kernel and the graphs there."""
    return CudaRunner(model(), shape(precision), identity="tiny", kernel=kernel, recorder=recorder, max_rows=max_rows)


def on_cuda(
    precision: Precision = Precision.FP32, kv_precision: KVPrecision = KVPrecision.FP32, *, has_graphs: bool = True
) -> CudaRunner:
    settings = LocalEngineSettings(max_sequences=8, max_draft=3, cuda_graphs=has_graphs)
    on_device = model(precision, torch.device("cuda"))
    return make_cuda_runner(on_device, shape(kv_precision), identity="tiny", settings=settings)


def run_and_keep(step: Step) -> Step:
    """Record nothing: a replay is the step itself, over the same buffers."""
    step()
    return step


def answers(
    runner: ModelRunner,
    *,
    chunk: int = 20,
    is_drafted: bool = False,
    prompts: Sequence[tuple[int, ...]] = PROMPTS,
    num_tokens: int = NUM_TOKENS,
) -> list[tuple[int, ...]]:
    """Return greedy answers to the prompts, with right and wrong drafts if asked for."""
    guides = run_greedy(reference(), prompts, num_tokens, chunk=chunk) if is_drafted else ()
    return run_greedy(runner, prompts, num_tokens, chunk=chunk, guides=guides)
