"""Single faults on real Kafka, real Redis and worker processes with a scripted engine, each under load.

What every reader saw, and the whole log, is compared with undisturbed runs: nothing lost, nothing twice, nothing
altered. One stack serves all tests. The long forms are marked slow.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
import pytest_asyncio

from ops.bench.chaos.judge import Observed, judge
from ops.bench.chaos.load import Asked, Load
from ops.bench.chaos.processes import WorkerProcess
from ops.bench.chaos.reference import Reference
from ops.bench.chaos.stack import ChaosStack, Size
from ops.bench.chaos.tail import read_tokens
from ops.percentile import percentile
from schemas.worker import Pool
from streams.client import GeaClient
from tests.real_parts import require_servers

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.redis,
    pytest.mark.chaos,
    pytest.mark.timeout(300),
    pytest.mark.asyncio(loop_scope="module"),
]
NUM_READERS = 8
TIMEOUT_S = 200.0
STOP_S = 40.0
READY_S = 60.0
log = logging.getLogger(__name__)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChaosStack]:
    require_servers()
    async with ChaosStack(tmp_path_factory.mktemp("chaos"), Size()) as started:
        yield started


class UnderLoad:
    """Readers that go on until `work` is done, and the judgement of all they asked for."""

    def __init__(self, stack: ChaosStack, seed: str) -> None:
        self.stack = stack
        self.num_tokens = 0
        self._arrived = asyncio.Event()
        self._load = Load(seed, 160, self._count)

    async def run(self, work: Callable[[], Awaitable[None]], *, num_rounds: int | None = None) -> list[Asked]:
        """Do `work` once tokens flow; `num_rounds` bounds the conversations of a reader."""
        is_over = asyncio.Event()

        async def read_on(client: GeaClient) -> None:
            num_held = 0
            while not is_over.is_set() and num_held != num_rounds:
                await self._load.hold(client, self._load.draw())
                num_held += 1

        async with self.stack.client(TIMEOUT_S) as client:
            readers = [asyncio.create_task(read_on(client)) for _ in range(NUM_READERS)]
            await self.tokens(100)
            await work()
            is_over.set()
            await asyncio.gather(*readers)
        return self._load.asked

    async def tokens(self, count: int) -> None:
        """Wait until readers have got so many more tokens."""
        target = self.num_tokens + count
        async with asyncio.timeout(TIMEOUT_S):
            while self.num_tokens < target:
                self._arrived.clear()
                await self._arrived.wait()

    def _count(self, count: int) -> None:
        self.num_tokens += count
        self._arrived.set()


async def assert_kept(stack: ChaosStack, asked: list[Asked]) -> None:
    """Every promise was kept for these requests."""
    observed = Observed(asked=asked, tokens=await read_tokens(stack.direct), received=(), audits=())
    async with Reference(stack.settings) as reference:
        assert await judge(observed, reference) == []
    assert all(each.seen.num_resets == 0 for each in asked)


async def restart(stack: ChaosStack, one: WorkerProcess) -> None:
    """Stop a worker in order and start it again under its name."""
    assert await stack.workers.stop(one, STOP_S) == 0
    one.log.write_bytes(b"")  # its last `ready` is not the next one's
    assert await stack.workers.ready(stack.workers.start(one.pool, one.name), READY_S)


async def away(stack: ChaosStack, seconds: float, *, is_killed: bool = False) -> None:
    await stack.restart_kafka(is_killed=is_killed, away_s=seconds)


@pytest.mark.parametrize("is_killed", [False, True], ids=["stopped", "killed"])
async def test_a_broker_that_restarts_in_mid_stream_changes_no_answer(stack: ChaosStack, is_killed: bool) -> None:
    load = UnderLoad(stack, f"restart-{is_killed}")
    await assert_kept(stack, await load.run(lambda: away(stack, 0, is_killed=is_killed)))


@pytest.mark.parametrize("seconds", [10, pytest.param(60, marks=pytest.mark.soak)])
async def test_a_broker_that_is_away_in_mid_stream_changes_no_answer(stack: ChaosStack, seconds: int) -> None:
    load = UnderLoad(stack, f"away-{seconds}")
    await assert_kept(stack, await load.run(lambda: away(stack, seconds), num_rounds=2))


@pytest.mark.parametrize("seconds", [5, pytest.param(30, marks=pytest.mark.soak)])
async def test_answers_go_on_while_redis_is_frozen(stack: ChaosStack, seconds: int) -> None:
    load = UnderLoad(stack, f"frozen-{seconds}")

    async def freeze() -> None:
        stack.signal_redis(signal.SIGSTOP)
        try:
            began = time.monotonic()
            while time.monotonic() - began < seconds:
                await load.tokens(100)  # raises if none come
        finally:
            stack.signal_redis(signal.SIGCONT)

    await assert_kept(stack, await load.run(freeze))


async def test_redis_that_forgets_everything_all_the_time_changes_no_answer(stack: ChaosStack) -> None:
    load = UnderLoad(stack, "flushed")

    async def flush() -> None:
        for _ in range(40):
            await stack.tell_redis("FLUSHALL")
            await load.tokens(30)

    await assert_kept(stack, await load.run(flush))


async def test_workers_that_leave_and_join_under_load_repeat_nothing(stack: ChaosStack) -> None:
    load = UnderLoad(stack, "3-1-3-1-3")

    async def shrink_and_grow() -> None:
        for _ in range(2):
            first, second, _ = stack.workers.of(Pool.GENERATION)
            for one in (first, second):
                assert await stack.workers.stop(one, STOP_S) == 0
            await load.tokens(150)
            for one in (first, second):
                one.log.write_bytes(b"")
                assert await stack.workers.ready(stack.workers.start(one.pool, one.name), READY_S)
            await load.tokens(150)

    await assert_kept(stack, await load.run(shrink_and_grow))


async def test_a_worker_ends_in_bounded_time_while_nothing_comes_from_the_broker(stack: ChaosStack) -> None:
    load = UnderLoad(stack, "blackhole")
    took: list[float] = []

    async def stop_in_the_dark() -> None:
        (one, *_) = stack.workers.of(Pool.GENERATION)
        stack.proxy.set_faults(is_blackhole=True)
        try:
            began = time.monotonic()
            code = await stack.workers.stop(one, STOP_S)
            took.append(time.monotonic() - began)
            assert code is not None, f"{one.name} was still there after {STOP_S} s"
        finally:
            stack.proxy.heal()
        one.log.write_bytes(b"")
        assert await stack.workers.ready(stack.workers.start(one.pool, one.name), READY_S)

    await assert_kept(stack, await load.run(stop_in_the_dark, num_rounds=2))
    log.info("a stop in a blackhole took %.1f s", took[0])


async def test_a_rolling_restart_of_every_pool_under_load_loses_and_repeats_nothing(stack: ChaosStack) -> None:
    usual, rolling = UnderLoad(stack, "usual"), UnderLoad(stack, "rolling")
    normal = await usual.run(lambda: usual.tokens(1_000))

    async def restart_all() -> None:
        for pool in Pool:
            for one in stack.workers.of(pool):
                await restart(stack, one)

    asked = await rolling.run(restart_all)
    await assert_kept(stack, [*normal, *asked])
    log.info("a whole answer took %s ms in the p99, at most %s ms during the restarts", p99(normal), slowest(asked))


def took_ms(asked: list[Asked]) -> list[int]:
    return [each.seen.arrivals[-1] - each.seen.sent_ms for each in asked if each.seen.arrivals]


def p99(asked: list[Asked]) -> float | None:
    return percentile(took_ms(asked), 0.99)


def slowest(asked: list[Asked]) -> int:
    return max(took_ms(asked))
