"""One round: a fresh stack, load and faults until the plan is done, silence, then the whole log is read and judged.

A round depends on the seed and its number alone, and leaves one plain result: so a long run can stop between two
rounds and go on later.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from ops.bench.chaos.checker import Audit
from ops.bench.chaos.driver import GENERATION_GROUP, Driver
from ops.bench.chaos.faults import FaultGroup, plan
from ops.bench.chaos.judge import Observed, judge
from ops.bench.chaos.load import Load
from ops.bench.chaos.reference import Reference
from ops.bench.chaos.result import RoundResult
from ops.bench.chaos.silence import find_leaks, idle_tasks, stop_all
from ops.bench.chaos.stack import ChaosStack, Size
from ops.bench.chaos.tail import Tail, read_received, read_tokens
from schemas.worker import Pool
from streams.client import GeaClient
from streams.racing import end_tasks
from streams.topics import pool_topic

NUM_CLIENTS = 3
TIMEOUT_S = 240.0  # of one answer: many kills in a row, a broker that is away and a lease may fall on it
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPlan:
    """What a round does."""

    seed: int
    number: int
    num_kills: int
    groups: frozenset[FaultGroup]
    size: Size
    num_readers: int = 14
    max_tokens: int = 160
    max_tokens_between: int = 250

    @property
    def name(self) -> str:
        """Return what its randomness follows from."""
        return f"{self.seed}-{self.number}"


async def run_round(wanted: RoundPlan, folder: Path, say: Say) -> RoundResult:
    """Run a round in `folder`, where all logs stay. Raises EmbeddedError, and RuntimeError for a bench that failed."""
    began = time.monotonic()
    async with ChaosStack(folder, wanted.size) as stack, Tail(stack.direct) as tail:
        idle = await idle_tasks(stack)
        driver = Driver(stack, tail, random.Random(wanted.name), max_tokens_between=wanted.max_tokens_between)
        driver.on_fault = lambda kind, kills: say(f"{kills}/{wanted.num_kills} kills, {kind}")
        load = Load(wanted.name, wanted.max_tokens, driver.count_tokens)
        await _work(stack, load, driver, wanted)
        say("waiting for silence")
        leaks = await find_leaks(stack, idle)
        observed = await _observe(stack, load, driver)
        loose_ends = await stop_all(stack) + driver.slow_stops + stack.workers.unexpected
        settings = stack.settings
    say("comparing with undisturbed runs")
    async with Reference(settings) as reference:
        problems = await judge(observed, reference, say)
    return RoundResult.of(observed, problems, driver, leaks, loose_ends, seconds=time.monotonic() - began)


async def _work(stack: ChaosStack, load: Load, driver: Driver, wanted: RoundPlan) -> None:
    """Keep readers busy until the plan is carried out, then let every answer come to its end."""
    is_over = asyncio.Event()

    async def read_on(client: GeaClient) -> None:
        while not is_over.is_set():
            await load.hold(client, load.draw())

    async with AsyncExitStack() as opened:
        clients = [await opened.enter_async_context(stack.client(TIMEOUT_S)) for _ in range(NUM_CLIENTS)]
        readers = [asyncio.create_task(read_on(clients[n % NUM_CLIENTS])) for n in range(wanted.num_readers)]
        try:
            await driver.carry_out(plan(driver.draw, wanted.num_kills, wanted.groups))
            is_over.set()
            await asyncio.gather(*readers)
        finally:
            await driver.close()
            await end_tasks(*readers)


async def _observe(stack: ChaosStack, load: Load, driver: Driver) -> Observed:
    committed = await stack.groups.committed(GENERATION_GROUP)
    tokens = await read_tokens(stack.direct)
    ends = Counter[int]()
    for entries in tokens.values():
        for entry in entries:
            ends[entry.partition] = max(ends[entry.partition], entry.offset + 1)
    last = Audit(group=GENERATION_GROUP, committed=committed, token_ends=ends)
    return Observed(
        asked=load.asked,
        tokens=tokens,
        received=await read_received(stack.direct, pool_topic(Pool.GENERATION, "blue")),
        audits=(*driver.audits, last),
        deaths=driver.deaths,
    )
