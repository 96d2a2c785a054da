"""What number formats cost in quality: perplexity on a fixed text, and whether int8 depends on who else is in a batch.

The text is teacher-forced through the same runner that serves requests, in chunks over its paged cache. Perplexity is
exp of the mean negative log-likelihood of each token after the first.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from ops.bench.engine.options import PROFILES, Workload
from ops.bench.engine.prompts import PROSE, PromptMaker
from workers.generation.engine.batch import ModelRunner, Segment, StepBatch
from workers.generation.engine.loader import find_device
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.opened import open_model
from workers.generation.engine.paged_cache import resolve_kv_precision
from workers.generation.engine.protocol import EngineRequest, KVPrecision, Precision, SamplingParams, TokenChunk
from workers.generation.engine.settings import Backend, LocalEngineSettings
from workers.generation.engine.tokenizer import BytePairTokenizer

CHUNK_TOKENS = 256
DIVERGENCE_BATCHES = (8, 32)
NUM_ALONE = 4
LIMITS = {Precision.INT8: 1.0, Precision.BF16: 0.5, Precision.FP16: 0.5}  # percent above fp32
KV_LIMIT = 0.5
FORMATS = (
    (Precision.FP32, KVPrecision.FP32),
    (Precision.BF16, KVPrecision.BF16),
    (Precision.FP16, KVPrecision.FP16),
    (Precision.INT8, KVPrecision.FP16),
    (Precision.FP32, KVPrecision.INT8),
    (Precision.INT8, KVPrecision.INT8),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityOptions:
    """`max_tokens` of the text are read, at most all; `num_drawn` tokens are drawn to see batches diverge."""

    folder: Path
    backend: Backend
    max_tokens: int = 4_096
    num_drawn: int = 32
    threads: int = 2


async def run_quality(options: QualityOptions, say: Callable[[str], None]) -> dict[str, Any]:
    """Return perplexities and divergences with their conditions. Raises ConfigError."""
    tokenizer = BytePairTokenizer.load(options.folder)
    token_ids = tokenizer.encode(PROSE.read_text("utf-8"))[: options.max_tokens]
    rows: list[dict[str, Any]] = []
    for precision, kv_precision in FORMATS:
        say(f"perplexity in {precision}, cache in {kv_precision}")
        value = await asyncio.to_thread(_perplexity_in, options, precision, kv_precision, token_ids)
        exact = rows[0]["perplexity"] if rows else value
        rows.append(_row(precision, kv_precision, value, exact))
    say("int8 alone and in batches")
    divergence = await diverge(options, PromptMaker.load(tokenizer, options.folder))
    return {
        "conditions": {
            "model": options.folder.name,
            "backend": str(options.backend),
            "text": f"{len(token_ids)} tokens of ops/bench/prose.txt, read in chunks of {CHUNK_TOKENS}",
            "divergence": f"greedy, {options.num_drawn} tokens; {NUM_ALONE} prompts alone, and among 8 and 32 at once",
        },
        "perplexity": rows,
        "divergence": divergence,
    }


def _row(precision: Precision, kv_precision: KVPrecision, value: float, exact: float) -> dict[str, Any]:
    limit = LIMITS.get(precision, KV_LIMIT)
    above = 100 * (value / exact - 1)
    return {
        "precision": str(precision),
        "kv_precision": str(kv_precision),
        "perplexity": value,
        "above_fp32_percent": round(above, 3),
        "limit_percent": limit,
        "met": abs(above) <= limit,
    }


def _perplexity_in(
    options: QualityOptions, precision: Precision, kv_precision: KVPrecision, token_ids: Sequence[int]
) -> float:
    settings = LocalEngineSettings(
        precision=precision,
        kv_precision=kv_precision,
        max_context=len(token_ids) + CHUNK_TOKENS,
        max_batched_tokens=CHUNK_TOKENS,
        num_threads=options.threads,
        device="cpu",
    )
    model = open_model(options.backend, options.folder, settings, find_device("cpu"))
    num_blocks = len(token_ids) // settings.block_size + 1
    shape = model.cache_shape(num_blocks, settings.block_size, resolve_kv_precision(kv_precision, precision))
    runner = model.make_runner(shape, "quality")
    try:
        return perplexity(runner, token_ids)
    finally:
        runner.close()


def perplexity(runner: ModelRunner, token_ids: Sequence[int], chunk_tokens: int = CHUNK_TOKENS) -> float:
    """Return the perplexity of a text under a runner whose cache holds it as a whole."""
    blocks = tuple(range(runner.layout.num_blocks))
    loss = 0.0
    for start in range(0, len(token_ids) - 1, chunk_tokens):
        read = token_ids[start : min(start + chunk_tokens, len(token_ids) - 1)]
        needed = blocks[: -(-(start + len(read)) // runner.layout.block_size)]
        segment = Segment(token_ids=tuple(read), start=start, block_table=needed, num_logits=len(read))
        logits = runner.forward(StepBatch(segments=(segment,))).double()  # (len(read), vocab)
        following = list(token_ids[start + 1 : start + 1 + len(read)])
        loss += float((logits.logsumexp(dim=-1) - logits[range(len(read)), following]).sum())
    return math.exp(loss / (len(token_ids) - 1))


async def diverge(options: QualityOptions, prompts: PromptMaker) -> list[dict[str, Any]]:
    """Return, for each number of requests at once, after how many tokens int8 first says something else than alone."""
    settings = LocalEngineSettings(
        precision=Precision.INT8, max_sequences=max(DIVERGENCE_BATCHES), num_threads=options.threads, device="cpu"
    )
    engine = LocalEngine(options.folder, settings)
    await engine.start()
    try:
        made = prompts.make(Workload.PLAIN, PROFILES["short"], 0, max(DIVERGENCE_BATCHES))
        alone = [(await _draw(engine, [prompt], options.num_drawn))[0] for prompt in made[:NUM_ALONE]]
        batches = {number: await _draw(engine, made[:number], options.num_drawn) for number in DIVERGENCE_BATCHES}
    finally:
        await engine.stop()
    return [_divergence(number, alone, batch) for number, batch in batches.items()]


def _divergence(number: int, alone: Sequence[Sequence[int]], batch: Sequence[Sequence[int]]) -> dict[str, Any]:
    places = [first_difference(one, other) for one, other in zip(alone, batch, strict=False)]
    parted = [place for place in places if place is not None]
    return {
        "at_once": number,
        "num_compared": len(alone),
        "num_tokens": len(alone[0]),
        "first_difference": min(parted, default=None),
        "met": not parted,
    }


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return how many tokens are equal before two answers part, None if they do not."""
    if list(one) == list(other):
        return None
    pairs = zip(one, other, strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


_numbers = count()


async def _draw(engine: LocalEngine, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """Return the answers of requests that run together. Each call has a salt of its own: nothing comes from a cache."""
    call = next(_numbers)

    async def read(place: int, prompt: Sequence[int]) -> list[int]:
        request = EngineRequest(
            request_id=f"quality-{call}-{place}",
            prompt=tuple(prompt),
            sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
            cache_salt=f"quality-{call}",
        )
        return [token for event in [e async for e in engine.submit(request)] if isinstance(event, TokenChunk)
                for token in event.token_ids]  # fmt: skip

    return list(await asyncio.gather(*(read(place, prompt) for place, prompt in enumerate(prompts))))
