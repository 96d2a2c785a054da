"""Who works where: pools, the status that every worker publishes each second, and route tables."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class Pool(StrEnum):
    """All workers of one stage."""

    ROUTER = "router"
    """Validates, admits, stamps and forwards."""
    INTENT = "intent"
    """Finds out what is wanted."""
    RETRIEVAL = "retrieval"
    """Finds passages."""
    GENERATION = "generation"
    """Writes the answer."""


class WorkerState(StrEnum):
    """Where a worker is in its life."""

    STARTING = "starting"
    """Loading weights or an index."""
    READY = "ready"
    """Loaded, assigned and warmed."""
    DRAINING = "draining"
    """Finishing its work, takes no more."""
    SUSPENDED = "suspended"
    """Slower or more faulty than its peers: has given up its partitions and probes itself."""
    FAILED = "failed"
    """Cannot work; `reason` says why."""


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One worker, as it sees itself. Times are Unix milliseconds; the key of its record is `worker_id`.

    `partitions` are those of its pool's topic that it owns. `request_ms` is how long a request takes it from receipt
    to acknowledgement, `error_rate` the share of its recent requests that failed by its own fault: both smoothed.
    `tokens_queued` estimates the tokens of received requests that are not decoded yet. `kv_usage` is the share of an
    engine's cache that running sequences hold.
    """

    worker_id: str
    pool: Pool
    colour: str
    state: WorkerState
    updated_ms: int
    started_ms: int = 0
    host: str = ""
    pid: int = 0
    reason: str = ""
    model: str = ""
    requests_in_flight: int = 0
    tokens_in_flight: int = 0
    num_queued: int = 0
    num_handled: int = 0
    step_ms: float = 0.0
    last_step_ms: int = 0
    num_partitions: int = 0
    lag: int = 0
    partitions: tuple[int, ...] = ()
    request_ms: float = 0.0
    error_rate: float = 0.0
    tokens_queued: int = 0
    kv_usage: float = 0.0


class RouteTable(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Which colours of a pool take new work. Weights are in hundredths of a percent and add up to 10,000."""

    pool: Pool
    version: int
    weights: dict[str, int]


class RouteStamp(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The colours that the router chose for one request, and the version of the table it read."""

    intent: str = "blue"
    retrieval: str = "blue"
    generation: str = "blue"
    version: int = 0
