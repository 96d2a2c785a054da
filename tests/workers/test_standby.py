"""How a worker steps aside: it says so first, and lets the one with precedence go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from schemas.worker import Pool, WorkerState, WorkerStatus
from workers.standby import Standby
from workers.suspension import OutlierLimits

LIMITS = OutlierLimits(factor=3, after_s=0.001, probe_s=0.005, max_probe_s=0.01)
READY, SUSPENDED = WorkerState.READY, WorkerState.SUSPENDED


def status(name: str, state: WorkerState = READY, step_ms: float = 20.0) -> WorkerStatus:
    return WorkerStatus(worker_id=name, pool=Pool.GENERATION, colour="blue", state=state, updated_ms=1, step_ms=step_ms)


@dataclass
class Scene:
    """Worker `b` among its peers; each look at it shows new work."""

    own: WorkerStatus = field(default_factory=lambda: status("b", step_ms=200))
    peers: list[WorkerStatus] = field(default_factory=lambda: [status("a"), status("c"), status("d")])
    entered: asyncio.Queue[WorkerState] = field(default_factory=asyncio.Queue)
    probes: list[float | Exception | None] = field(default_factory=list)
    num_probes: int = 0

    def look(self) -> WorkerStatus:
        self.own = msgspec.structs.replace(self.own, num_handled=self.own.num_handled + 1)
        return self.own

    def enter(self, state: WorkerState, reason: str) -> None:
        self.entered.put_nowait(state)
        self.own = msgspec.structs.replace(self.own, state=state, reason=reason)

    async def probe(self) -> float | None:
        self.num_probes += 1
        result = self.probes.pop(0)
        if isinstance(result, Exception):
            raise result
        return result

    def standby(self) -> Standby:
        return Standby(
            LIMITS,
            status=self.look,
            pool=lambda: [self.own, *self.peers],
            probe=self.probe,
            enter=self.enter,
            interval_s=0.002,
        )


async def test_an_outlier_says_that_it_is_out_before_it_goes() -> None:
    scene = Scene()
    async with asyncio.timeout(5):
        await scene.standby().until_suspended()
    assert scene.entered.get_nowait() is SUSPENDED
    assert scene.own.reason == "step_ms 200, usual 20"


async def test_of_two_that_say_so_at_once_the_one_without_precedence_goes_on() -> None:
    scene = Scene()
    watching = asyncio.create_task(scene.standby().until_suspended())
    async with asyncio.timeout(5):
        assert await scene.entered.get() is SUSPENDED
        scene.peers[0] = status("a", SUSPENDED)
        assert await scene.entered.get() is READY
    assert not watching.done()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_it_probes_until_it_is_as_fast_as_its_peers() -> None:
    scene = Scene(probes=[200.0, RuntimeError("broken"), 90.0, 30.0, 1.0])
    async with asyncio.timeout(5):
        await scene.standby().until_fit(asyncio.Event())
    assert scene.num_probes == 4


async def test_without_a_measure_time_alone_brings_it_back() -> None:
    scene = Scene(probes=[None])
    async with asyncio.timeout(5):
        await scene.standby().until_fit(asyncio.Event())
    assert scene.num_probes == 1


async def test_it_comes_back_without_a_probe_where_it_is_needed() -> None:
    scene = Scene(peers=[status("a")])
    async with asyncio.timeout(5):
        await scene.standby().until_fit(asyncio.Event())
    assert scene.num_probes == 0


async def test_a_stop_ends_the_waiting() -> None:
    scene = Scene(probes=[200.0] * 1000)
    stop = asyncio.Event()
    waiting = asyncio.create_task(scene.standby().until_fit(stop))
    await asyncio.sleep(0)
    stop.set()
    async with asyncio.timeout(5):
        await waiting


async def test_a_stop_waits_for_no_probe() -> None:
    probing, stop = asyncio.Event(), asyncio.Event()

    class Hanging(Scene):
        async def probe(self) -> float | None:
            probing.set()
            await asyncio.Event().wait()
            return None

    waiting = asyncio.create_task(Hanging().standby().until_fit(stop))
    await probing.wait()
    stop.set()
    async with asyncio.timeout(5):
        await waiting
