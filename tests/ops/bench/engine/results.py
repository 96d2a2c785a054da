"""Results as the engine bench gives them, with the figures that a test cares about."""

from __future__ import annotations

from typing import Any


def result(engine: str = "gea", precision: str = "int8", **given: Any) -> dict[str, Any]:
    """Return a result: 100 tokens a second, 10 ms to the first token, 5 between, 400 in all, 300 MB of 900."""
    rate = given.pop("tokens_per_s", 100.0)
    latency = given.pop("latency", 400.0)
    return {
        "engine": engine,
        "precision": precision,
        "workload": "plain",
        "profile": "short",
        "concurrency": 8,
        "tokens_per_s": rate,
        "tokens_per_s_spread": [rate, rate],
        "decode_tokens_per_s": rate,
        "ttft_ms": {"p50": 10.0, "p99": 20.0},
        "itl_ms": {"p50": 5.0, "p99": 9.0},
        "latency_ms": {"mean": latency, "p50": latency, "p99": latency},
        "num_runs": 1,
        "num_measured_tokens": 64,
        "is_reckoned": False,
        "peak_memory_mb": 900.0,
        "serving_peak_mb": 850.0,
        "peak_model_mb": 300.0,
        "serving_model_mb": 250.0,
        "memory_parts_mb": {"imports": 600.0, "weights": 200.0, "kv": 40.0, "other": 10.0},
        "cores_busy_elsewhere": 0.1,
        "version": "1",
        "how": "as it is",
    } | given
