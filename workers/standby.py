"""How a worker steps aside that is worse than its peers: says so, hands over, probes itself, comes back.

It knows statuses and a probe, not records. The invariant: a worker gives its partitions up only after everybody could
hear that it is suspended, and only if nobody with precedence has said the same.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

import structlog

from schemas.worker import WorkerState, WorkerStatus
from streams.racing import first_of
from workers.suspension import MIN_READY, OutlierLimits, OutlierWatch, ProbePace, has_precedence, may_return

log = structlog.get_logger(__name__)

PROBE_TIMEOUT_S = 30.0


class Standby:
    """Watches one worker among its peers. `enter` publishes a new state and its reason at once."""

    def __init__(
        self,
        limits: OutlierLimits,
        *,
        status: Callable[[], WorkerStatus],
        pool: Callable[[], Sequence[WorkerStatus]],
        probe: Callable[[], Awaitable[float | None]],
        enter: Callable[[WorkerState, str], None],
        interval_s: float,
    ) -> None:
        self._limits = limits
        self._status = status
        self._pool = pool
        self._probe = probe
        self._enter = enter
        self._interval_s = interval_s
        self._pace = ProbePace(limits)

    async def until_suspended(self) -> None:
        """Return when this worker has to hand its work over; its state says so already."""
        watch = OutlierWatch(self._limits)
        while True:
            await asyncio.sleep(self._interval_s)
            reason = watch.note(self._status(), self._pool(), _now())
            if reason is not None and await self._announce(reason):
                return

    async def until_fit(self, stop: asyncio.Event) -> None:
        """Probe with growing pauses; return when the worker may take work again, or is to stop."""
        self._pace.suspend(_now())
        await first_of(self._until_fit(), stop.wait())  # a stop waits for no probe: that may hang
        self._pace.come_back(_now())

    async def _until_fit(self) -> None:
        await self._pause(self._pace.next_delay_s())
        while not await self._is_fit():
            await self._pause(self._pace.next_delay_s())

    async def _announce(self, reason: str) -> bool:
        """Say that we are out and listen whether another one has said it at the same moment; False to go on."""
        self._enter(WorkerState.SUSPENDED, reason)
        await asyncio.sleep(2 * self._interval_s)
        if has_precedence(self._status().worker_id, self._others()):
            log.warning("suspended", reason=reason)
            return True
        self._enter(WorkerState.READY, "")
        return False

    async def _pause(self, delay_s: float) -> None:
        """Wait; shorter if the pool needs us."""
        deadline = _now() + delay_s
        while (left_s := deadline - _now()) > 0 and not self._is_needed():  # noqa: ASYNC110 - no event tells of it
            await asyncio.sleep(min(self._interval_s, left_s))

    async def _is_fit(self) -> bool:
        if self._is_needed():
            return True
        try:
            async with asyncio.timeout(PROBE_TIMEOUT_S):
                probe_ms = await self._probe()
        except Exception as error:
            log.warning("probe_failed", error=str(error) or type(error).__name__)
            return False
        is_fit = may_return(probe_ms, self._others(), self._limits)
        log.info("probed", step_ms=probe_ms, is_fit=is_fit)
        return is_fit

    def _is_needed(self) -> bool:
        return sum(worker.state is WorkerState.READY for worker in self._others()) < MIN_READY - 1

    def _others(self) -> list[WorkerStatus]:
        own_id = self._status().worker_id
        return [worker for worker in self._pool() if worker.worker_id != own_id]


def _now() -> float:
    return asyncio.get_running_loop().time()
