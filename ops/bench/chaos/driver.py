"""Carries a plan of faults out on a running stack, each at a random token, and remembers when whom it killed.

Faults that last go on beside the next ones; only one of them spoils the proxy at a time.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.bench.chaos.checker import Audit
from ops.bench.chaos.faults import FaultKind
from ops.bench.chaos.gaps import Death
from ops.bench.chaos.processes import WorkerProcess
from ops.bench.chaos.stack import ChaosStack
from ops.bench.chaos.tail import Tail
from schemas.errors import GeaError
from schemas.worker import Pool
from streams.clock import now_ms
from streams.racing import end_tasks
from streams.topics import TOKENS, pool_group

ASK_S = 0.03  # how often the group is asked whether it has noticed a death
PATIENCE_S = 20.0  # a fault comes at last, even if no token does
COLOUR = "blue"
GENERATION_GROUP = pool_group(Pool.GENERATION, COLOUR)
STOP_S = 25.0
AUDIT_EVERY = 3
NOTICED_SHARE = 0.5  # of the kills that the next fault waits for
RECONNECT_MS = 3_000  # clients back off, and a worker whose lease was in doubt takes its partitions anew


@dataclass(slots=True)
class Driver:
    """Drives one plan. `tail` sees the token log as it grows."""

    stack: ChaosStack
    tail: Tail
    draw: random.Random
    max_tokens_between: int = 250
    """A fault comes after so many tokens of all readers at most."""
    on_fault: Callable[[FaultKind, int], None] = lambda kind, kills: None
    num_kills: int = 0
    num_kills_at_work: int = 0
    num_tokens: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    deaths: list[Death] = field(default_factory=list)
    audits: list[Audit] = field(default_factory=list)
    slow_stops: list[str] = field(default_factory=list)
    disturbed: list[tuple[int, int]] = field(default_factory=list)
    """When the way to Kafka was spoiled, with the time to reconnect: Unix milliseconds."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _arrived: asyncio.Event = field(default_factory=asyncio.Event)
    _proxy_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _broker_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    _failures: list[BaseException] = field(default_factory=list)
    _num_extra: int = 0

    def count_tokens(self, count: int) -> None:
        """Hear that readers got tokens."""
        self.num_tokens += count
        self._arrived.set()

    async def carry_out(self, plan: Sequence[FaultKind]) -> None:
        """Do one fault after the other, then wait until all are over and what was killed lives again."""
        for number, kind in enumerate(plan):
            await self._after_tokens(self.draw.randint(1, self.max_tokens_between))
            self.counts[kind.value] += 1
            await self._do(kind)
            self.on_fault(kind, self.num_kills)
            if number % AUDIT_EVERY == 0:
                await self._audit()
            self.stack.workers.revive()
        while self._tasks:
            await asyncio.wait(self._tasks)
        self._raise_failures()

    async def kill(self, one: WorkerProcess) -> None:
        """Kill a worker; it comes back at once, and when its group notices is watched for."""
        members = await self._member_ids(one)
        census, killed_ms = one.census(), now_ms()
        self.stack.workers.kill(one)
        self.num_kills += 1
        self.num_kills_at_work += bool(census and census["tokens_in_flight"])
        self._begin(self._come_back(one))
        if members:
            self._begin(self._watch(one, members, killed_ms))

    async def _do(self, kind: FaultKind) -> None:
        match kind:
            case FaultKind.KILL:
                await self.kill(await self._any(Pool.GENERATION))
                await self._perhaps_until_noticed()
            case FaultKind.KILL_OTHER:
                await self.kill(await self._any(self.draw.choice((Pool.ROUTER, Pool.INTENT, Pool.RETRIEVAL))))
            case FaultKind.KILL_PAIR:
                await self.kill(await self._any(Pool.GENERATION))
                await asyncio.sleep(self.draw.uniform(0, self.stack.size.sessions.session_ms / 1000))
                await self.kill(await self._any(Pool.GENERATION))
                await self._perhaps_until_noticed()
            case FaultKind.KILL_TAKER:
                self.tail.claimed.clear()
                await self.kill(await self._any(Pool.GENERATION))
                await self._within(PATIENCE_S, self.tail.claimed)
                await self.kill(await self._any(Pool.GENERATION))
            case FaultKind.LEAVE:
                self._begin(self._leave(await self._any(Pool.GENERATION), is_back=True))
            case FaultKind.JOIN:
                self._begin(self._join())
            case FaultKind.BROKER_RESTART | FaultKind.BROKER_KILL:
                self._begin(self._restart_broker(is_killed=kind is FaultKind.BROKER_KILL))
            case FaultKind.REDIS_FREEZE:
                self._begin(self._freeze_redis(self.draw.uniform(1, 4)))
            case FaultKind.REDIS_FLUSH:
                self._begin(self.stack.tell_redis("FLUSHALL"))
            case FaultKind.REDIS_EVICT:
                self._begin(self._evict())
            case FaultKind.CUT:
                self._disturb(now_ms())
                self.stack.proxy.cut()
            case FaultKind.HALF_CLOSE:
                self._disturb(now_ms())
                self.stack.proxy.half_close()
            case FaultKind.DELAY:
                self._begin(self._spoil(self.draw.uniform(1, 3), delay_s=self.draw.uniform(0.05, 0.4)))
            case FaultKind.THROTTLE:
                self._begin(self._spoil(self.draw.uniform(1, 3), bytes_per_s=self.draw.randint(5_000, 50_000)))
            case FaultKind.BLACKHOLE:
                self._begin(self._spoil(self.draw.uniform(0.5, 3), is_blackhole=True))
            case FaultKind.REFUSE:
                self._begin(self._spoil(self.draw.uniform(0.5, 3), is_refusing=True, is_cut=True))

    async def _any(self, pool: Pool) -> WorkerProcess:
        """Return a living worker of a pool at random; where all are dead, wait for the first that comes back."""
        while not (living := self.stack.workers.of(pool)):  # noqa: ASYNC110 - no event of theirs
            await asyncio.sleep(ASK_S)
        return self.draw.choice(living)

    async def _after_tokens(self, count: int) -> None:
        """Wait until readers have got so many more tokens."""
        target, deadline = self.num_tokens + count, time.monotonic() + PATIENCE_S
        while self.num_tokens < target and time.monotonic() < deadline:
            self._arrived.clear()
            await self._within(1.0, self._arrived)

    async def _perhaps_until_noticed(self) -> None:
        """In some cases let the group notice first, so that there is something to take over."""
        if self.draw.random() < NOTICED_SHARE:
            num_known, deadline = len(self.deaths), time.monotonic() + PATIENCE_S
            while len(self.deaths) == num_known and time.monotonic() < deadline:  # noqa: ASYNC110 - a list has no event
                await asyncio.sleep(ASK_S)

    async def _within(self, seconds: float, event: asyncio.Event) -> None:
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    async def _member_ids(self, one: WorkerProcess) -> frozenset[str]:
        try:
            view = await self.stack.groups.view(pool_group(one.pool, COLOUR))
        except GeaError:
            return frozenset()
        return frozenset(member for member, client in view.members.items() if client.endswith(f"-{one.name}"))

    async def _watch(self, one: WorkerProcess, members: frozenset[str], killed_ms: int) -> None:
        """Wait until the group has dropped a dead member."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                view = await self.stack.groups.view(pool_group(one.pool, COLOUR))
            except GeaError:  # the broker is away as well
                await asyncio.sleep(ASK_S)
                continue
            if not members & view.members.keys():
                if one.pool is Pool.GENERATION:
                    self.deaths.append(Death(worker=one.name, killed_ms=killed_ms, noticed_ms=now_ms()))
                return
            await asyncio.sleep(ASK_S)

    async def _come_back(self, one: WorkerProcess) -> None:
        await self.stack.workers.gone(one, PATIENCE_S)
        if self.stack.workers.running[one.name] is one:
            self.stack.workers.start(one.pool, one.name)

    async def _leave(self, one: WorkerProcess, *, is_back: bool) -> None:
        code = await self.stack.workers.stop(one, STOP_S)
        if code != 0:
            self.slow_stops.append(f"{one.name}: {'not within ' + str(STOP_S) + ' s' if code is None else code}")
        if is_back and self.stack.workers.running[one.name] is one:
            self.stack.workers.start(one.pool, one.name)

    async def _join(self) -> None:
        self._num_extra += 1
        extra = self.stack.workers.start(Pool.GENERATION, f"generation-extra-{self._num_extra}")
        await asyncio.sleep(self.draw.uniform(2, 6))
        if self.stack.workers.running[extra.name] is extra and extra.is_alive:
            await self._leave(extra, is_back=False)
        # killed in the meantime: `_come_back` has started another one of that name, which stays

    async def _restart_broker(self, *, is_killed: bool) -> None:
        async with self._broker_lock:
            since_ms = now_ms()
            await self.stack.restart_kafka(is_killed=is_killed, away_s=self.draw.uniform(0, 2))
            self._disturb(since_ms)

    async def _freeze_redis(self, seconds: float) -> None:
        self.stack.signal_redis(signal.SIGSTOP)
        try:
            await asyncio.sleep(seconds)
        finally:
            self.stack.signal_redis(signal.SIGCONT)

    async def _evict(self) -> None:
        await self.stack.tell_redis("CONFIG SET maxmemory-policy allkeys-random", "CONFIG SET maxmemory 1")
        await asyncio.sleep(1.0)
        await self.stack.tell_redis("CONFIG SET maxmemory 1gb", "CONFIG SET maxmemory-policy noeviction")

    async def _spoil(self, seconds: float, *, is_cut: bool = False, **faults: Any) -> None:
        async with self._proxy_lock:
            since_ms = now_ms()
            self.stack.proxy.set_faults(**faults)
            if is_cut:
                self.stack.proxy.cut()
            try:
                await asyncio.sleep(seconds)
            finally:
                self.stack.proxy.heal()
                self._disturb(since_ms)

    def _disturb(self, since_ms: int) -> None:
        self.disturbed.append((since_ms, now_ms() + RECONNECT_MS))

    async def _audit(self) -> None:
        """Remember what is committed, and then how long the token log is."""
        try:
            committed = await self.stack.groups.committed(GENERATION_GROUP)
            ends = await self.tail.ends()
        except GeaError:
            return  # the broker is away
        token_ends = {place.partition: end for place, end in ends.items() if place.topic == TOKENS}
        self.audits.append(Audit(group=GENERATION_GROUP, committed=committed, token_ends=token_ends))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        self._raise_failures()
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failures.append(error)

    def _raise_failures(self) -> None:
        if self._failures:
            raise RuntimeError("a fault could not be carried out") from self._failures[0]

    async def close(self) -> None:
        """Cancel what still goes on."""
        await end_tasks(*self._tasks)
