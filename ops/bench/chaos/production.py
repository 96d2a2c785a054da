"""The gap that a reader sees when a worker dies under the production settings: sessions of 8 s, not of 1.5 s.

A few deaths are enough: the time is the session's, not ours.
"""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

from ops.bench.chaos.checker import Seen
from ops.bench.chaos.gaps import longest_gap_ms
from ops.bench.chaos.load import take
from ops.bench.chaos.processes import WorkerProcess
from ops.bench.chaos.round import Say
from ops.bench.chaos.stack import PRODUCTION, ChaosStack, Size
from schemas.request import Retrieval, Strategy
from schemas.worker import Pool
from streams.client import GeaClient
from streams.clock import now_ms

NUM_DEATHS = 3
PACE_MS = 150.0  # 200 tokens then take 30 s: longer than a session and what follows it
TOKENS_BEFORE = 5
TIMEOUT_S = 180.0
POLL_S = 0.1


async def production_gaps(size: Size, folder: Path, say: Say) -> list[int]:
    """Return the longest pause within each of a few streams whose worker was killed, in milliseconds."""
    slow = dataclasses.replace(size, sessions=PRODUCTION, num_generation=2, num_routers=1, pace_ms=PACE_MS)
    async with ChaosStack(folder, slow) as stack, stack.client(TIMEOUT_S) as client:
        gaps = []
        for number in range(NUM_DEATHS):
            say(f"gap at production defaults, {number + 1} of {NUM_DEATHS}")
            gaps.append(await _gap(stack, client, number))
    return gaps


async def _gap(stack: ChaosStack, client: GeaClient, number: int) -> int:
    seen = Seen(request_id=f"production-{number}")
    stream = client.generate(
        f"Write a long story about a mountain, a river and a bridge, number {number}.",
        request_id=seen.request_id,
        strategy=Strategy.DIALOGUE,
        retrieval=Retrieval.OFF,
        max_tokens=200,
        temperature=0.0,
        repetition_penalty=1.3,
        seed=number,
    )
    killing: asyncio.Task[None] | None = None
    async for chunk in stream:
        take(seen, chunk, now_ms())
        if killing is None and len(seen.arrivals) >= TOKENS_BEFORE:
            killing = asyncio.create_task(_kill_whoever_works(stack))
    if killing is not None:
        await killing
    return longest_gap_ms(seen)


async def _kill_whoever_works(stack: ChaosStack) -> None:
    """Kill the generation worker that has tokens in flight, and start it again."""
    while (one := _at_work(stack)) is None:  # noqa: ASYNC110 - a census is a file
        await asyncio.sleep(POLL_S)
    stack.workers.kill(one)
    await stack.workers.gone(one, 5)
    stack.workers.start(one.pool, one.name)


def _at_work(stack: ChaosStack) -> WorkerProcess | None:
    for each in stack.workers.of(Pool.GENERATION):
        census = each.census()
        if census is not None and census["tokens_in_flight"]:
            return each
    return None
