"""The engine's numbers for Prometheus, under vLLM's names where it has one, with the prefix `gea_`.

Knows statistics, no engine's inside. What an engine counts itself is read when it is asked for, so that the figures are
those of the moment; steps and requests are noted as they end. All of it is safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from streams.telemetry import TOKENS, Metrics
from workers.generation.engine.pace import StepReport
from workers.generation.engine.protocol import Finished
from workers.generation.engine.statistics import EngineStatistics

STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)

GAUGES: dict[str, tuple[str, Callable[[EngineStatistics], float]]] = {
    "gea_kv_cache_usage_perc": ("Share of the cache's blocks in use; 1 is all.", lambda found: found.kv_usage),
    "gea_active_blocks": ("Blocks that running sequences hold.", lambda found: found.active_blocks),
    "gea_cached_blocks": ("Blocks that only the prefix cache holds.", lambda found: found.cached_blocks),
    "gea_total_blocks": ("Blocks of the cache.", lambda found: found.total_blocks),
    "gea_fragmentation": ("Share of active blocks' positions without a token.", lambda found: found.fragmentation),
    "gea_allocator_slack_bytes": ("Reserved by the allocator, not handed out.", lambda f: f.allocator_slack_bytes),
    "gea_tokens_in_flight": ("Positions that running sequences have in the cache.", lambda f: f.tokens_in_flight),
    "gea_batch_size": ("Sequences in the last step.", lambda found: found.batch_size),
    "gea_tokens_per_s": ("Tokens drawn in a second, smoothed over the last steps.", lambda found: found.tokens_per_s),
}
COUNTERS: dict[str, tuple[str, Callable[[EngineStatistics], float]]] = {
    "gea_prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", lambda found: found.prefix_queries),
    "gea_prefix_cache_hits": ("Prompt tokens found there.", lambda found: found.prefix_hits),
    "gea_num_preemptions": ("Sequences that had to make room for others.", lambda found: found.num_preemptions),
    "gea_swap_ops": ("Moves of a sequence's cache to host memory, or back.", lambda found: found.swap_ops),
    "gea_spec_decode_num_draft_tokens": ("Tokens guessed ahead.", lambda found: found.num_draft_tokens),
    "gea_spec_decode_num_accepted_tokens": ("Guesses that were right.", lambda found: found.num_accepted_tokens),
    "gea_steps": ("Steps of the engine.", lambda found: found.num_steps),
}


class EngineMetrics:
    """What one engine tells Prometheus, in the registry of its worker."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._step_seconds = metrics.histogram("gea_step_seconds", "One step of the engine.", STEP_SECONDS)
        self._iteration_tokens = metrics.histogram("gea_iteration_tokens_total", "Tokens of a step.", TOKENS)
        self._queue_time = metrics.histogram("gea_request_queue_time_seconds", "In the engine before its first step.")
        self._prefill_time = metrics.histogram("gea_request_prefill_time_seconds", "From there to the first token.")
        self._decode_time = metrics.histogram("gea_request_decode_time_seconds", "From the first token to the end.")
        self._generation_tokens = metrics.histogram("gea_request_generation_tokens", "Tokens of an answer.", TOKENS)
        self._repetition = metrics.histogram(
            "gea_request_repetition_ratio", "Share of a choice's runs of four tokens that had occurred before.", SHARES
        )

    def watch(self, statistics: Callable[[], EngineStatistics]) -> None:
        """Show an engine's statistics from now on, as they are when somebody asks."""
        self._metrics.registry.register(_Statistics(statistics, self._metrics.labels))

    def note_step(self, step: StepReport) -> None:
        """Count one step."""
        self._step_seconds.observe(step.seconds)
        self._iteration_tokens.observe(step.num_tokens)

    def note_finished(self, finished: Finished) -> None:
        """Count a request that has ended in the engine."""
        self._queue_time.observe(finished.queue_ms / 1e3)
        self._prefill_time.observe(finished.prefill_ms / 1e3)
        self._decode_time.observe(finished.decode_ms / 1e3)
        self._generation_tokens.observe(finished.usage.completion_tokens)
        for choice in finished.choices:
            self._repetition.observe(choice.repetition_ratio)


class _Statistics(Collector):
    def __init__(self, statistics: Callable[[], EngineStatistics], labels: dict[str, str]) -> None:
        self._read = statistics
        self._labels = labels

    def describe(self) -> Iterator[Metric]:
        """Return the names without asking the engine, which may not be there yet."""
        return self._families(EngineStatistics())

    def collect(self) -> Iterator[Metric]:
        return self._families(self._read())

    def _families(self, found: EngineStatistics) -> Iterator[Metric]:
        names, values = list(self._labels), list(self._labels.values())
        for name, (text, value) in GAUGES.items():
            gauge = GaugeMetricFamily(name, text, labels=names)
            gauge.add_metric(values, value(found))
            yield gauge
        for name, (text, value) in COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=names)
            counter.add_metric(values, value(found))
            yield counter
