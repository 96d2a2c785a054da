"""How long a request would take on a worker that is seen only once a second: the model behind `least_load`. Pure.

A worker says how long its requests took lately (W) and how many it has finished, which gives its rate (λ). From both
follows its pace, the time that each request in hand adds: 1 / (λ + 1/W), exact for a queue with one server, where
W = 1 / (μ - λ); one that works on many at once seems faster than it is, as do all of its kind. Between two statuses the
backlog x is carried on by what was sent there and by what it finishes meanwhile (the pointwise stationary
approximation of a queue, dx/dt = -x / (pace · (1 + x))), else each fresh status would draw all traffic to its sender.
"""

from __future__ import annotations

import math
from collections import deque

from schemas.worker import Pool, WorkerStatus

SETTLE_S = 0.05  # what was sent so shortly before a status came is not in it yet
MEMORY_S = 5.0  # what is smoothed over statuses follows a change within it
TRUST_S = 10.0  # half-life of a pace that no finished request confirms: a worker that was slow is tried again


class Backlog:
    """One worker, as seen from here. Work is counted in requests of mean size; times are seconds of one clock."""

    def __init__(self) -> None:
        self._status: WorkerStatus | None = None
        self._sent: deque[tuple[float, float]] = deque()
        self._work = 0.0
        self._at_s = 0.0
        self._request_s = 0.0
        self._rate = 0.0
        self._confirmed_s = 0.0

    @property
    def pace_s(self) -> float | None:
        """Return the seconds that a request in hand adds, None while no request has been finished."""
        return 1 / (self._rate + 1 / self._request_s) if self._request_s > 0 else None

    def take(self, status: WorkerStatus, now_s: float, mean_tokens: float) -> None:
        """Take a status; one that is known already changes nothing."""
        known = self._status
        if status == known:
            return
        num_finished = finished_between(known, status)
        if num_finished is None:
            self._request_s = status.request_ms / 1000
            self._rate, self._confirmed_s = 0.0, now_s
        elif num_finished > 0:
            self._learn(status.request_ms / 1000, num_finished, now_s)
        while self._sent and self._sent[0][0] < now_s - SETTLE_S:
            self._sent.popleft()
        in_log = waiting_in_log(status, num_finished or 0)
        self._work = received_work(status, mean_tokens) + in_log + sum(work for _, work in self._sent)
        self._at_s = now_s
        self._status = status

    def work(self, now_s: float, fallback_pace_s: float) -> float:
        """Return the requests in hand by now, carried on from the last status."""
        pace_s = self.pace_s or fallback_pace_s
        elapsed_s = max(0.0, now_s - self._at_s)
        return self._work * math.exp(-elapsed_s / (pace_s * (1 + self._work)))

    def expected_s(self, now_s: float, pool_pace_s: float) -> float:
        """Return how long a request would take here. `pool_pace_s` is what the pool's workers usually need."""
        return (self.work(now_s, pool_pace_s) + 1) * self.trusted_pace_s(now_s, pool_pace_s)

    def trusted_pace_s(self, now_s: float, pool_pace_s: float) -> float:
        """Return the pace, drawn towards the pool's while nothing confirms it."""
        if self.pace_s is None:
            return pool_pace_s
        trust: float = 0.5 ** (max(0.0, now_s - self._confirmed_s) / TRUST_S)
        return pool_pace_s + trust * (self.pace_s - pool_pace_s)

    def send(self, now_s: float, work: float, pool_pace_s: float) -> None:
        """Count a request that was sent there."""
        self._work = self.work(now_s, pool_pace_s) + work
        self._at_s = now_s
        self._sent.append((now_s, work))

    def _learn(self, request_s: float, num_finished: int, now_s: float) -> None:
        """Smooth time and rate together: over the same span, or an idle worker would seem slow."""
        span_s = max(0.001, now_s - self._confirmed_s)
        weight = 1 - math.exp(-span_s / MEMORY_S) if self._rate and self._request_s else 1.0
        self._request_s += weight * (request_s - self._request_s)
        self._rate += weight * (num_finished / span_s - self._rate)
        self._confirmed_s = now_s


def finished_between(known: WorkerStatus | None, status: WorkerStatus) -> int | None:
    """Return the requests that a worker has finished between two of its statuses, None if it began anew in between."""
    if known is None or known.started_ms != status.started_ms:
        return None
    return status.num_handled - known.num_handled


def waiting_in_log(status: WorkerStatus, num_finished: int) -> int:
    """Return the records that a worker has not received: the lag, without those that it has in hand or just finished.

    What is finished but not committed stands in the lag, too; it waits for nobody.
    """
    return max(0, status.lag - status.requests_in_flight - max(0, num_finished))


def received_work(status: WorkerStatus, mean_tokens: float) -> float:
    """Return what a worker has left to do, in requests of mean size: by tokens where it counts them (generation)."""
    if status.pool is Pool.GENERATION and status.tokens_queued and mean_tokens > 0:
        return status.tokens_queued / mean_tokens
    return float(status.requests_in_flight)
