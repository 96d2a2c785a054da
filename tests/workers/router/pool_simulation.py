"""A pool of workers on a virtual clock: requests arrive, are placed, wait, are served; statuses come once a second."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from schemas.envelope import Origin, Reply, RoutedRequest
from schemas.request import GenerationRequest
from schemas.worker import Pool, WorkerState, WorkerStatus
from workers.placement import Placement

SMOOTHING = 0.1  # of `request_ms`, as in streams.delivery
STATUS_S = 1.0
TRAVEL_S = 0.03  # of a status or a request
START_MS = 1_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    arrived_s: float
    work_s: float
    routed: RoutedRequest
    tokens: int


@dataclass(slots=True)
class SimulatedWorker:
    """Serves `slots` requests at once, in order of arrival; a request takes its work times `slowness`."""

    name: str
    partitions: tuple[int, ...]
    slots: int
    slowness: float
    queue: deque[Job] = field(default_factory=deque)
    running: int = 0
    tokens: int = 0
    num_handled: int = 0
    request_ms: float = 0.0

    def status(self, now_s: float, *, counts_tokens: bool) -> WorkerStatus:
        return WorkerStatus(
            worker_id=self.name,
            pool=Pool.GENERATION,
            colour="blue",
            state=WorkerState.READY,
            updated_ms=START_MS + int(now_s * 1000),
            partitions=self.partitions,
            requests_in_flight=self.running + len(self.queue),
            tokens_queued=self.tokens if counts_tokens else 0,
            num_handled=self.num_handled,
            lag=self.running + len(self.queue),
            request_ms=self.request_ms,
        )


class Seen:
    """What the router knows: the statuses that have arrived."""

    def __init__(self) -> None:
        self.statuses: dict[str, WorkerStatus] = {}

    def workers(
        self, pool: Pool | None = None, colour: str | None = None, state: WorkerState | None = WorkerState.READY
    ) -> tuple[WorkerStatus, ...]:
        found = (self.statuses[name] for name in sorted(self.statuses))
        return tuple(
            s for s in found if pool in (None, s.pool) and colour in (None, s.colour) and state in (None, s.state)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`utilisation` is of a pool in which all workers are as fast as the fast ones."""

    slowness: Sequence[float]
    slots: int
    utilisation: float = 0.65
    mean_work_s: float = 1.0
    spread: float = 0.5
    num_requests: int = 20_000
    counts_tokens: bool = True
    seed: int = 1


class Simulation:
    """One run. `make` gets what the router sees and the virtual clock."""

    def __init__(self, load: Load, make: Callable[[Seen, Callable[[], float]], Placement]) -> None:
        self.load = load
        self.now_s = 0.0
        self.seen = Seen()
        self.placement = make(self.seen, lambda: self.now_s)
        self.workers = [
            SimulatedWorker(f"w-{n}", tuple(range(4 * n, 4 * n + 4)), load.slots, slowness)
            for n, slowness in enumerate(load.slowness)
        ]
        self.latencies: list[tuple[float, float]] = []
        self.num_sent = dict.fromkeys((worker.name for worker in self.workers), 0)
        self._random = random.Random(load.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def run(self) -> list[float]:
        """Return the latencies of all requests but the first third, in seconds."""
        for number, worker in enumerate(self.workers):
            self._at(number / len(self.workers), lambda worker=worker: self._publish(worker))  # type: ignore[misc]
        rate = self.load.utilisation * len(self.workers) * self.load.slots / self.load.mean_work_s
        at_s = 0.0
        for number in range(self.load.num_requests):
            at_s += self._random.expovariate(rate)
            work = self._random.lognormvariate(-(self.load.spread**2) / 2, self.load.spread)
            self._at(at_s, lambda number=number, work=work: self._arrive(number, work))  # type: ignore[misc]
        while self._events and len(self.latencies) < self.load.num_requests:
            self.now_s, _, event = heapq.heappop(self._events)
            event()
        return [latency for _, latency in sorted(self.latencies)[self.load.num_requests // 3 :]]

    def _at(self, at_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._order), event))

    def _publish(self, worker: SimulatedWorker) -> None:
        status = worker.status(self.now_s, counts_tokens=self.load.counts_tokens)
        self._at(self.now_s + TRAVEL_S, lambda: self.seen.statuses.update({worker.name: status}))
        self._at(self.now_s + STATUS_S, lambda: self._publish(worker))

    def _arrive(self, number: int, work: float) -> None:
        tokens = max(1, round(256 * work))
        routed = RoutedRequest(
            request_id=f"r-{number}",
            request=GenerationRequest(prompt="x", max_tokens=tokens),
            reply=Reply(topic="gea.tokens", partition=0),
            origin=Origin(partition=0, offset=number),
            seed=1,
            received_ms=0,
            deadline_ms=0,
        )
        job = Job(arrived_s=self.now_s, work_s=work * self.load.mean_work_s, routed=routed, tokens=tokens)
        partition = self.placement.partition("gea.generation.blue", routed)
        assert partition is not None
        worker = self.workers[partition // 4]
        self.num_sent[worker.name] += 1
        self._at(self.now_s + TRAVEL_S, lambda: self._receive(worker, job))

    def _receive(self, worker: SimulatedWorker, job: Job) -> None:
        worker.queue.append(job)
        worker.tokens += job.tokens
        self._serve(worker)

    def _serve(self, worker: SimulatedWorker) -> None:
        while worker.queue and worker.running < worker.slots:
            job = worker.queue.popleft()
            worker.running += 1
            self._at(self.now_s + job.work_s * worker.slowness, lambda job=job: self._finish(worker, job))  # type: ignore[misc]

    def _finish(self, worker: SimulatedWorker, job: Job) -> None:
        worker.running -= 1
        worker.tokens -= job.tokens
        latency_s = self.now_s - job.arrived_s
        took_ms = (latency_s - TRAVEL_S) * 1000
        worker.request_ms += SMOOTHING * (took_ms - worker.request_ms) if worker.num_handled else took_ms
        worker.num_handled += 1
        self.latencies.append((job.arrived_s, latency_s))
        self._serve(worker)
