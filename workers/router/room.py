"""Whether the generation pool has room for one more request, counted in tokens, and how fast it makes room. Pure.

What is on its way to the pool is what its workers report, what the pools before it still have in hand, and what this
router has sent since it heard from all of them. Other routers' newest requests are seen a status later.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from schemas.worker import Pool, WorkerState, WorkerStatus
from workers.router.backlog import SETTLE_S, finished_between, waiting_in_log
from workers.router.cost import MeanTokens
from workers.router.placement import Workers

DONE_FACTOR = 2.0  # a request that no worker reports after so many times its usual way has been answered
RATE_SPAN_S = 10.0
MIN_RATE_SPAN_S = 3.0  # before, a rate says little


@dataclass(frozen=True, slots=True, kw_only=True)
class _Heard:
    """The last status of a worker, when it came, and the records that it had not received then."""

    status: WorkerStatus
    at_s: float
    num_in_log: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What all statuses say together: tokens and whole requests on the way, and how far back both are complete."""

    num_ready: int = 0
    tokens: float = 0.0
    num_requests: int = 0
    covered_s: float = 0.0
    usual_way_s: float = math.inf


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
        self._statuses: tuple[WorkerStatus, ...] = ()
        self._heard: dict[str, _Heard] = {}
        self._report = _Report()
        self._sent: deque[tuple[float, int]] = deque()
        self._sent_tokens = 0
        self._num_sent_blind = 0
        self._mean_tokens = MeanTokens()
        self._rate = _Rate()

    def has_room(self) -> bool:
        """Return whether one more request may go on.

        Without a ready worker as many may as may be queued: one may be on its way.
        """
        self._listen()
        if not self._report.num_ready:
            return self._num_sent_blind < self._max_queue_depth
        self._num_sent_blind = 0
        return self.tokens_on_the_way() < self._max_tokens_per_worker * self._report.num_ready

    def send(self, tokens: int, *, is_limited: bool) -> None:
        """Count a request that goes on. `is_limited`: others wait for room, so that its rate is the pool's."""
        now_s = self._clock()
        self._sent.append((now_s, tokens))
        self._sent_tokens += tokens
        self._num_sent_blind += 1
        self._mean_tokens.add(tokens)
        self._rate.add(now_s, tokens if is_limited else None)

    def tokens_on_the_way(self) -> float:
        """Return the tokens that are in the pool or on their way to it."""
        return self._report.tokens + self._report.num_requests * (self._mean_tokens.value or 1.0) + self._sent_tokens

    def tokens_per_s(self) -> float | None:
        """Return how fast requests go on while others wait, None while that is not known."""
        return self._rate.tokens_per_s(self._clock())

    def _listen(self) -> None:
        """Take the statuses that have come, and forget what they cover."""
        now_s = self._clock()
        statuses = self._workers.workers(state=None)
        if statuses != self._statuses:
            self._statuses = statuses
            self._heard = {s.worker_id: _hear(s, self._heard.get(s.worker_id), now_s) for s in statuses}
            self._report = _sum_up(self._heard.values())
        done_s = now_s - DONE_FACTOR * self._report.usual_way_s
        while self._sent and self._sent[0][0] < max(self._report.covered_s, done_s) - SETTLE_S:
            self._sent_tokens -= self._sent.popleft()[1]


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


def _hear(status: WorkerStatus, known: _Heard | None, now_s: float) -> _Heard:
    if known is not None and known.status == status:
        return known
    num_finished = finished_between(known.status if known is not None else None, status)
    return _Heard(status=status, at_s=now_s, num_in_log=waiting_in_log(status, num_finished or 0))


def _sum_up(heard: Iterable[_Heard]) -> _Report:
    behind = [each for each in heard if each.status.pool is not Pool.ROUTER]
    generation = [each for each in behind if each.status.pool is Pool.GENERATION]
    return _Report(
        num_ready=sum(each.status.state is WorkerState.READY for each in generation),
        tokens=sum(_tokens(each.status) for each in generation),
        num_requests=sum(
            each.num_in_log + (0 if _tokens(each.status) else each.status.requests_in_flight) for each in behind
        ),
        covered_s=min((each.at_s for each in behind), default=0.0),
        usual_way_s=_usual_way_s([each.status for each in behind]),
    )


def _tokens(status: WorkerStatus) -> int:
    """Return the tokens of requests in hand, decoded and not decoded yet: what each was counted with when it went."""
    return status.tokens_in_flight + status.tokens_queued if status.pool is Pool.GENERATION else 0


def _usual_way_s(statuses: Sequence[WorkerStatus]) -> float:
    """Return how long a request usually takes through the pools, the slowest worker of each; endless if unknown."""
    slowest = {pool: max((s.request_ms for s in statuses if s.pool is pool), default=0.0) for pool in Pool}
    return sum(slowest.values()) / 1000 if slowest[Pool.GENERATION] else math.inf
