"""Logs as JSON events, W3C trace context and Prometheus metrics.

Nothing happens at import: `main` calls `configure_logging` and `serve_metrics`. Metric names follow vLLM's where it has
one, with the prefix `gea_`.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from schemas.errors import ConfigError
from streams.log_pace import LogPace

TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
LEVELS = ("debug", "info", "warning", "error", "critical")
# From one token on a GPU to a long answer of a small CPU model.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKENS = (1, 8, 32, 128, 512, 2_048, 8_192, 32_768)


def configure_logging(level: str = "info", *, stream: TextIO | None = None, **fields: str) -> None:
    """Write every log event as one line of JSON, those of libraries too. Only `main` calls it.

    `fields` (pool, colour, worker_id …) stand in every event. Raises ConfigError for an unknown level.
    """
    if level.lower() not in LEVELS:
        raise ConfigError(f"log_level: {level!r} is not allowed: {', '.join(LEVELS)}")

    def add_fields(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        return {**fields, **event}

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.format_exc_info,
        structlog.processors.UnicodeDecoder(),
        add_fields,
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    render = structlog.processors.JSONRenderer(ensure_ascii=False, default=str)
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=shared,
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render],
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(formatter)
    handler.addFilter(LogPace())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level.upper())
    logging.getLogger("aiokafka").setLevel(max(logging.WARNING, root.level))


@contextmanager
def bind_request(request_id: str, *, traceparent: str | None = None, **fields: str) -> Iterator[None]:
    """Put `request_id`, the trace and `fields` into every log event of this block and the tasks it starts."""
    trace = parse_traceparent(traceparent)
    if trace is not None:
        fields = {"trace_id": trace.trace_id, "span_id": trace.span_id, **fields}
    with structlog.contextvars.bound_contextvars(request_id=request_id, **fields):
        yield


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A place in a trace (https://www.w3.org/TR/trace-context/): ids in lower-case hex."""

    trace_id: str
    span_id: str
    is_sampled: bool = False

    def child(self) -> Trace:
        """Return a new span of the same trace."""
        return Trace(trace_id=self.trace_id, span_id=secrets.token_hex(8), is_sampled=self.is_sampled)

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{'01' if self.is_sampled else '00'}"


def new_trace() -> Trace:
    """Begin a trace."""
    return Trace(trace_id=secrets.token_hex(16), span_id=secrets.token_hex(8), is_sampled=True)


def parse_traceparent(text: str | None) -> Trace | None:
    """Read a `traceparent` header; None for a missing or malformed one, as the standard wants."""
    match = TRACEPARENT.fullmatch(text or "")
    if match is None or not int(match[1], 16) or not int(match[2], 16):
        return None
    return Trace(trace_id=match[1], span_id=match[2], is_sampled=bool(int(match[3], 16) & 1))


def child_traceparent(text: str | None) -> str:
    """Return the header for the next hop: a child of `text`, or a new trace where there is none."""
    parent = parse_traceparent(text)
    return str(parent.child() if parent else new_trace())


class Metrics:
    """The metrics of one worker process, in a registry of its own; all carry its pool and colour."""

    def __init__(self, *, pool: str, colour: str, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry or CollectorRegistry()
        self.labels = {"pool": pool, "colour": colour}
        self.num_requests_running = self.gauge("gea_num_requests_running", "Requests in work.")
        self.num_requests_waiting = self.gauge("gea_num_requests_waiting", "Requests received and not yet in work.")
        self.time_to_first_token = self.histogram(
            "gea_time_to_first_token_seconds", "From the router's receipt to the first token."
        )
        self.inter_token_latency = self.histogram("gea_inter_token_latency_seconds", "Between tokens of a request.")
        self.e2e_request_latency = self.histogram(
            "gea_e2e_request_latency_seconds", "From the router's receipt to the end."
        )
        self.request_prompt_tokens = self.histogram("gea_request_prompt_tokens", "Prompt tokens.", TOKENS)
        self.prompt_tokens = self.counter("gea_prompt_tokens", "Prompt tokens in all.")
        self.generation_tokens = self.counter("gea_generation_tokens", "Published tokens in all.")
        self.consumer_lag = self.gauge("gea_consumer_lag", "Records of the own partitions not yet committed.")
        self.dead_letters = self.counter("gea_dead_letters", "Records given up.")
        self._ended = Counter(
            "gea_request_success",
            "Requests that ended, by reason (vLLM's name: failures count too).",
            ("pool", "colour", "finished_reason"),
            registry=self.registry,
        )

    def count_end(self, finished_reason: str) -> None:
        """Count a request that ended."""
        self._ended.labels(**self.labels, finished_reason=finished_reason).inc()

    def counter(self, name: str, text: str) -> Counter:
        """Make a counter; Prometheus adds `_total` to its name."""
        return Counter(name, text, tuple(self.labels), registry=self.registry).labels(**self.labels)

    def gauge(self, name: str, text: str) -> Gauge:
        """Make a gauge."""
        return Gauge(name, text, tuple(self.labels), registry=self.registry).labels(**self.labels)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...] = SECONDS) -> Histogram:
        """Make a histogram."""
        made = Histogram(name, text, tuple(self.labels), registry=self.registry, buckets=buckets)
        return made.labels(**self.labels)


class MetricsServer:
    """Serves a registry over HTTP from a thread of its own, until closed."""

    def __init__(self, registry: CollectorRegistry, port: int, host: str) -> None:
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Stop serving. Idempotent."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=5)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def serve_metrics(registry: CollectorRegistry, port: int, *, host: str = "127.0.0.1") -> MetricsServer:
    """Serve metrics at `http://host:port/metrics`; port 0 takes a free one. The caller closes it.

    Raises ConfigError if the port is taken.
    """
    try:
        return MetricsServer(registry, port, host)
    except OSError as error:
        raise ConfigError(f"metrics.port: {host}:{port} cannot be opened: {error}") from error
