"""What the engine's memory goes into: keys and values as answers grow, what a budget holds, waste, and weights.

The paged figures come from our own scheduler and block pool, run with a model that computes nothing; the figures of a
contiguous cache, which gives every sequence its longest length at once, are arithmetic. Knows no prompts of people.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from statistics import mean
from typing import Any

from ops.bench.blank_runner import BlankRunner, BytesTokenizer
from workers.generation.engine.core import EngineCore
from workers.generation.engine.limits import Limits
from workers.generation.engine.loader import find_device
from workers.generation.engine.opened import OpenedModel, open_model
from workers.generation.engine.paged_cache import CacheShape
from workers.generation.engine.protocol import EngineRequest, KVPrecision, Precision, SamplingParams
from workers.generation.engine.settings import Backend, LocalEngineSettings

MAX_CONTEXT = 2_048
PROMPT_TOKENS = 128
BUDGET_BYTES = 256 << 20
PROFILE = (512, 128)  # prompt and answer of the sequences that a budget holds
NUM_MIXED = 96
SEED = 4
KV_PRECISIONS = (KVPrecision.FP32, KVPrecision.FP16, KVPrecision.INT8)
PRECISIONS = (Precision.FP32, Precision.BF16, Precision.FP16, Precision.INT8)
WASTE_TARGET = 4.0  # percent
MB = 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryOptions:
    """`folder` is a model folder of the Llama family; `budget_bytes` is what the cache may have.

    `more_files` hold the same weights in another form; their sizes are shown beside the folder's.
    """

    folder: Path
    backend: Backend
    more_files: tuple[Path, ...] = ()
    budget_bytes: int = BUDGET_BYTES
    block_size: int = LocalEngineSettings().block_size


def run_memory(options: MemoryOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Return all figures with their conditions. Raises ConfigError for a model that cannot be run."""
    weights, shape_of = [], None
    for precision in PRECISIONS:
        say(f"weights in {precision}")
        model = _open(options, precision)
        weights.append({"precision": str(precision), "weights_mb": round(model.weights_bytes / MB, 1)})
        shape_of = model.cache_shape
    assert shape_of is not None
    shapes = {kv: shape_of(1, options.block_size, kv) for kv in KV_PRECISIONS}
    say("waste on mixed lengths")
    return {
        "conditions": _conditions(options),
        "weights": weights,
        "files": file_figures([*sorted(options.folder.glob("*.safetensors")), *options.more_files]),
        "growth": [{"kv_precision": str(kv), **growth(shape)} for kv, shape in shapes.items()],
        "budget": [{"kv_precision": str(kv), **budget(shape, options.budget_bytes)} for kv, shape in shapes.items()],
        "waste": waste(shapes[KVPrecision.FP16]),
    }


def file_figures(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the size of each file of weights."""
    return [{"file": file.name, "file_mb": round(file.stat().st_size / MB, 1)} for file in files]


def growth(shape: CacheShape) -> dict[str, Any]:
    """Return the bytes of one sequence over the length of its answer, paged and contiguous."""
    outputs = list(range(0, MAX_CONTEXT - PROMPT_TOKENS + 1, 64))
    blocks = [-(-(PROMPT_TOKENS + output) // shape.block_size) for output in outputs]
    return {
        "output_tokens": outputs,
        "paged_mb": [round(num * shape.bytes_per_block / MB, 2) for num in blocks],
        "contiguous_mb": round(_contiguous_bytes(shape) / MB, 2),
    }


def budget(shape: CacheShape, budget_bytes: int, num_mixed: int = 2 * NUM_MIXED) -> dict[str, Any]:
    """Return how many sequences run at once within a budget without preemption, and how long a context may be.

    On mixed lengths, which need less and are not known beforehand, it is the mean while others wait for room.
    """
    num_blocks = budget_bytes // shape.bytes_per_block
    prompt, answer = PROFILE
    lengths = [(prompt, answer)] * (num_blocks * shape.block_size // sum(PROFILE))
    mixed = mixed_lengths(num_mixed)
    return {
        "budget_mb": round(budget_bytes / MB, 1),
        "profile": f"{prompt}/{answer}",
        "sequences": len(lengths) if not _drain(shape, num_blocks, lengths, len(lengths)).num_preemptions else 0,
        "sequences_mixed": _drain(shape, num_blocks, mixed, len(mixed)).mean_crowded,
        "sequences_contiguous": budget_bytes // _contiguous_bytes(shape),
        "longest_context": num_blocks * shape.block_size,
        "longest_context_contiguous": MAX_CONTEXT,
    }


def waste(shape: CacheShape, num_mixed: int = NUM_MIXED) -> dict[str, Any]:
    """Return the share of positions in blocks that hold no token, step by step on mixed lengths, in percent."""
    lengths = mixed_lengths(num_mixed)
    most = sum(-(-(prompt + answer) // shape.block_size) for prompt, answer in lengths)
    drained = _drain(shape, most, lengths, len(lengths))
    shares = sorted(drained.shares)
    return {
        "num_sequences": len(lengths),
        "mean_prompt_tokens": round(mean(prompt for prompt, _ in lengths)),
        "mean_answer_tokens": round(mean(answer for _, answer in lengths)),
        "block_size": shape.block_size,
        "mean_percent": round(100 * mean(shares), 2),
        "p99_percent": round(100 * shares[int(0.99 * (len(shares) - 1))], 2),
        "target_percent": WASTE_TARGET,
        "met": 100 * mean(shares) < WASTE_TARGET,
    }


def mixed_lengths(number: int) -> list[tuple[int, int]]:
    """Return prompt and answer lengths, log-uniform from 16 to 1,024 and 16 to 512: the same ones each time."""
    draws = random.Random(SEED)
    return [(int(16 * 64 ** draws.random()), int(16 * 32 ** draws.random())) for _ in range(number)]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drained:
    shares: list[float]
    mean_crowded: float
    num_preemptions: int


def _drain(shape: CacheShape, num_blocks: int, lengths: Sequence[tuple[int, int]], max_sequences: int) -> _Drained:
    """Run requests of these lengths to their ends in a cache of as many blocks."""
    runner = BlankRunner(num_blocks=num_blocks, shape=shape)
    limits = Limits(max_sequences=max(1, max_sequences), max_draft=0)
    core = EngineCore(runner, BytesTokenizer(), max_context=MAX_CONTEXT, limits=limits)
    numbers = count()
    for prompt, answer in lengths:
        number = next(numbers)
        token_ids = (1 + number // 200, 1 + number % 200, *((3,) * max(0, prompt - 2)))[:prompt]
        sampling = SamplingParams(max_tokens=answer, temperature=0.0)
        core.add(EngineRequest(request_id=str(number), prompt=token_ids, sampling=sampling), lambda event: None)
    shares, crowded = [], []
    while not core.is_idle:
        core.step()
        statistics = core.statistics()
        if statistics.active_blocks:
            shares.append(statistics.fragmentation)
        if statistics.waiting:
            crowded.append(statistics.running)
    return _Drained(
        shares=shares,
        mean_crowded=round(mean(crowded), 1) if crowded else float(len(lengths)),
        num_preemptions=core.statistics().num_preemptions,
    )


def _contiguous_bytes(shape: CacheShape) -> int:
    """Return what a contiguous cache gives each sequence: the longest context."""
    return MAX_CONTEXT * shape.bytes_per_block // shape.block_size


def _open(options: MemoryOptions, precision: Precision) -> OpenedModel:
    settings = LocalEngineSettings(precision=precision, max_context=MAX_CONTEXT, device="cpu")
    return open_model(options.backend, options.folder, settings, find_device("cpu"))


def _conditions(options: MemoryOptions) -> dict[str, Any]:
    return {
        "model": options.folder.name,
        "backend": str(options.backend),
        "block_size": options.block_size,
        "max_context": MAX_CONTEXT,
        "contiguous": "every sequence gets the longest context at once, in the same number format (arithmetic)",
        "paged": "our scheduler and block pool with a model that computes nothing; prefix cache on, prompts differ",
        "weights": "in memory, as loaded; every precision is made from the same file while it is read",
    }
