"""Whether the generation pool has room for one more request, counted in tokens, and how fast it makes room. Pure.

What is on its way to the pool is what its workers report, what the pools before it still have in hand, and what this
router has sent since it heard from all of them. Other routers' newest requests are seen a status later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from schemas.worker import Pool, WorkerState, WorkerStatus
from workers.router.backlog import SETTLE_S
from workers.router.placement import Workers

COST_SMOOTHING = 0.95
DONE_FACTOR = 2.0  # a request that no worker reports after so many times its usual way has been answered
RATE_SPAN_S = 10.0
MIN_RATE_SPAN_S = 3.0  # before, a rate says little


@dataclass(slots=True)
class _Heard:
    """The last status of a worker, when it came, and the records that it had not received then."""

    status: WorkerStatus
    at_s: float
    num_in_log: int = 0


class Room:
    """The room of the pool, as one router sees it."""

    def __init__(
        self,
        workers: Workers,
        *,
        max_tokens_per_worker: int,
        max_queue_depth: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._workers = workers
        self._max_tokens_per_worker = max_tokens_per_worker
        self._max_queue_depth = max_queue_depth
        self._clock = clock
        self._heard: dict[str, _Heard] = {}
        self._sent: deque[tuple[float, int]] = deque()
        self._sent_tokens = 0
        self._num_sent_blind = 0
        self._mean_tokens = 0.0
        self._rate = _Rate()

    def has_room(self) -> bool:
        """Return whether one more request may go on. Without a ready worker so many may as may be queued: one may be
        on its way."""
        self._listen()
        num_ready = sum(status.state is WorkerState.READY for status in self._statuses(Pool.GENERATION))
        if not num_ready:
            return self._num_sent_blind < self._max_queue_depth
        self._num_sent_blind = 0
        return self.tokens_on_the_way() < self._max_tokens_per_worker * num_ready

    def send(self, tokens: int, *, is_limited: bool) -> None:
        """Count a request that goes on. `is_limited`: others wait for room, so that its rate is the pool's."""
        now_s = self._clock()
        self._sent.append((now_s, tokens))
        self._sent_tokens += tokens
        self._num_sent_blind += 1
        self._mean_tokens += (1 - COST_SMOOTHING) * (tokens - self._mean_tokens) if self._mean_tokens else tokens
        self._rate.add(now_s, tokens if is_limited else None)

    def tokens_on_the_way(self) -> float:
        """Return the tokens that are in the pool or on their way to it."""
        mean = self._mean_tokens or 1.0
        in_generation = sum(
            _received(heard.status, mean) + heard.num_in_log * mean for heard in self._of(Pool.GENERATION)
        )
        num_before = sum(
            heard.status.requests_in_flight + heard.num_in_log
            for pool in (Pool.INTENT, Pool.RETRIEVAL)
            for heard in self._of(pool)
        )
        return in_generation + num_before * mean + self._sent_tokens

    def tokens_per_s(self) -> float | None:
        """Return how fast requests go on while others wait, None while that is not known."""
        return self._rate.tokens_per_s(self._clock())

    def _listen(self) -> None:
        """Take the statuses that have come, and forget what they cover."""
        now_s = self._clock()
        living = {status.worker_id: status for status in self._workers.workers(state=None)}
        for name in self._heard.keys() - living.keys():
            del self._heard[name]
        for name, status in living.items():
            known = self._heard.get(name)
            if known is None or status != known.status:
                self._heard[name] = _Heard(status, now_s, _in_log(status, known.status if known else None))
        heard = [h for pool in (Pool.INTENT, Pool.RETRIEVAL, Pool.GENERATION) for h in self._of(pool)]
        covered_s = min((h.at_s for h in heard), default=0.0) - SETTLE_S
        done_s = now_s - SETTLE_S - DONE_FACTOR * self._usual_way_s()
        while self._sent and self._sent[0][0] < max(covered_s, done_s):
            self._sent_tokens -= self._sent.popleft()[1]

    def _usual_way_s(self) -> float:
        """Return how long a request usually takes through the pools; endless while nobody knows."""
        times = {pool: [h.status.request_ms for h in self._of(pool)] for pool in Pool if pool is not Pool.ROUTER}
        if not any(times[Pool.GENERATION]):
            return float("inf")
        return sum(max(of_pool, default=0.0) for of_pool in times.values()) / 1000

    def _of(self, pool: Pool) -> Iterable[_Heard]:
        return (heard for heard in self._heard.values() if heard.status.pool is pool)

    def _statuses(self, pool: Pool) -> Iterable[WorkerStatus]:
        return (heard.status for heard in self._of(pool))


class _Rate:
    """Tokens a second over the last while in which requests had to wait."""

    def __init__(self) -> None:
        self._sent: deque[tuple[float, int]] = deque()

    def add(self, now_s: float, tokens: int | None) -> None:
        if tokens is None:
            self._sent.clear()
            return
        self._sent.append((now_s, tokens))
        self._drop(now_s)

    def tokens_per_s(self, now_s: float) -> float | None:
        self._drop(now_s)
        if not self._sent or now_s - self._sent[0][0] < MIN_RATE_SPAN_S:
            return None
        return sum(tokens for _, tokens in self._sent) / (now_s - self._sent[0][0])

    def _drop(self, now_s: float) -> None:
        while self._sent and self._sent[0][0] < now_s - RATE_SPAN_S:
            self._sent.popleft()


def _received(status: WorkerStatus, mean_tokens: float) -> float:
    """Return the tokens of requests in hand, decoded and not decoded yet: what each was counted with when it went."""
    return status.tokens_in_flight + status.tokens_queued or status.requests_in_flight * mean_tokens


def _in_log(status: WorkerStatus, before: WorkerStatus | None) -> int:
    """Return the records that wait in a worker's partitions: the lag, without those in hand or just finished."""
    is_same_life = before is not None and before.started_ms == status.started_ms
    num_finished = status.num_handled - before.num_handled if before is not None and is_same_life else 0
    return max(0, status.lag - status.requests_in_flight - max(0, num_finished))
