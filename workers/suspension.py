"""When a worker that is worse than its peers steps aside, and when it comes back.

Pure: decides by the statuses that every worker publishes, so that all workers of a pool decide alike. The invariants:
at most one worker of a pool and colour is out at a time, the worst first; two ready ones remain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from schemas.errors import ConfigError
from schemas.worker import WorkerState, WorkerStatus

MIN_READY = 3  # below it, nobody steps aside: with one peer it is open who of the two is the outlier
MIN_EXCESS_MS = 5.0  # a step of a few milliseconds may well be several times as long as another one


@dataclass(frozen=True, slots=True, kw_only=True)
class OutlierLimits:
    """Who counts as an outlier, and how long it stays out.

    `factor`: how many times its peers' median a worker's time, or share of failures, may be; `error_rate`: failures
    below it are never too many; `after_s`: how long that must last; `probe_s` to `max_probe_s`: time between probes.
    """

    factor: float = 3.0
    error_rate: float = 0.2
    after_s: float = 10.0
    probe_s: float = 5.0
    max_probe_s: float = 300.0

    def __post_init__(self) -> None:
        if not self.factor > 1:
            raise ConfigError(f"outlier.factor: {self.factor!r} is not allowed: above 1")
        if not 0 < self.error_rate <= 1:
            raise ConfigError(f"outlier.error_rate: {self.error_rate!r} is not allowed: above 0 to 1")
        for key in ("after_s", "probe_s", "max_probe_s"):
            if not getattr(self, key) > 0:
                raise ConfigError(f"outlier.{key}: {getattr(self, key)!r} is not allowed: above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """How far a worker is beyond its peers: 1 is the border, above it is an outlier."""

    ratio: float
    reason: str


def excess(worker: WorkerStatus, peers: Sequence[WorkerStatus], limits: OutlierLimits) -> Excess | None:
    """Return how a worker is an outlier among ready peers, None if it is not."""
    found = [each for each in (_slowness(worker, peers, limits), _faultiness(worker, peers, limits)) if each]
    return max(found, key=lambda each: each.ratio, default=None)


def reason_to_suspend(own: WorkerStatus, pool: Sequence[WorkerStatus], limits: OutlierLimits) -> str | None:
    """Return why this worker has to step aside now, None if it has not. `pool`: all that live, in any state."""
    others = [worker for worker in pool if worker.worker_id != own.worker_id]
    if own.state is not WorkerState.READY or any(worker.state is WorkerState.SUSPENDED for worker in others):
        return None
    ready = [own, *(worker for worker in others if worker.state is WorkerState.READY)]
    if len(ready) < MIN_READY:
        return None
    found = {
        worker.worker_id: beyond
        for worker in ready
        if (beyond := excess(worker, [peer for peer in ready if peer is not worker], limits)) is not None
    }
    if own.worker_id not in found:
        return None
    worst = max(found, key=lambda worker_id: (found[worker_id].ratio, worker_id))
    return found[own.worker_id].reason if worst == own.worker_id else None


def has_precedence(own_id: str, pool: Sequence[WorkerStatus]) -> bool:
    """Return whether this worker may stay suspended although others have said the same at the same moment."""
    return all(own_id <= worker.worker_id for worker in pool if worker.state is WorkerState.SUSPENDED)


def may_return(probe_ms: float | None, peers: Sequence[WorkerStatus], limits: OutlierLimits) -> bool:
    """Return whether a suspended worker, whose probe took `probe_ms` per step, may take work again.

    None: its probe tells no time, and time alone has to do. With fewer than two ready peers it is needed in any case.
    """
    ready = [worker for worker in peers if worker.state is WorkerState.READY]
    if len(ready) < MIN_READY - 1 or probe_ms is None:
        return True
    usual = [worker.step_ms for worker in ready if worker.step_ms > 0]
    return not usual or probe_ms <= max(limits.factor * median(usual), median(usual) + MIN_EXCESS_MS)


class OutlierWatch:
    """Whether a worker has been an outlier for long enough, on fresh evidence."""

    def __init__(self, limits: OutlierLimits) -> None:
        self._limits = limits
        self._since: float | None = None
        self._evidence: tuple[int, int] = (0, 0)

    def note(self, own: WorkerStatus, pool: Sequence[WorkerStatus], now: float) -> str | None:
        """Return why the worker has to step aside, once that has been so for `after_s` and over new work."""
        reason = reason_to_suspend(own, pool, self._limits)
        evidence = (own.num_handled, own.last_step_ms)
        if reason is None:
            self._since = None
        elif self._since is None:
            self._since, self._evidence = now, evidence
        elif now - self._since >= self._limits.after_s and evidence != self._evidence:
            return reason
        return None


class ProbePace:
    """Time between probes: doubles with each that fails, and with each return that did not last."""

    def __init__(self, limits: OutlierLimits) -> None:
        self._limits = limits
        self._delay_s = limits.probe_s
        self._returned_at: float | None = None

    def suspend(self, now: float) -> None:
        """Begin a suspension; a worker that has done well for `max_probe_s` begins with the shortest time."""
        if self._returned_at is not None and now - self._returned_at >= self._limits.max_probe_s:
            self._delay_s = self._limits.probe_s

    def next_delay_s(self) -> float:
        """Return how long to wait for the next probe."""
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, max(self._limits.max_probe_s, self._limits.probe_s))
        return delay_s

    def come_back(self, now: float) -> None:
        """Note the end of a suspension."""
        self._returned_at = now


def _slowness(worker: WorkerStatus, peers: Sequence[WorkerStatus], limits: OutlierLimits) -> Excess | None:
    """Compare step times where all know theirs, else the times of whole requests."""
    for unit, of in _TIMES.items():
        times = [of(peer) for peer in peers]
        if of(worker) > 0 and all(time > 0 for time in times):
            usual, own = median(times), of(worker)
            if own <= max(limits.factor * usual, usual + MIN_EXCESS_MS):
                return None
            return Excess(ratio=own / (limits.factor * usual), reason=f"{unit} {own:.0f}, usual {usual:.0f}")
    return None


def _faultiness(worker: WorkerStatus, peers: Sequence[WorkerStatus], limits: OutlierLimits) -> Excess | None:
    usual, own = median(peer.error_rate for peer in peers), worker.error_rate
    border = max(limits.error_rate, limits.factor * usual)
    if own < border:
        return None
    return Excess(ratio=own / border, reason=f"error_rate {own:.2f}, usual {usual:.2f}")


_TIMES: dict[str, Callable[[WorkerStatus], float]] = {
    "step_ms": lambda worker: worker.step_ms,
    "request_ms": lambda worker: worker.request_ms,
}
