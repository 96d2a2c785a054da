"""Logs, trace context and metrics as operators see them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import socket
from urllib.request import urlopen

import pytest
import structlog

from schemas.errors import ConfigError
from streams.telemetry import (
    Metrics,
    bind_request,
    child_traceparent,
    configure_logging,
    new_trace,
    parse_traceparent,
    serve_metrics,
)

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.fixture
def lines() -> io.StringIO:
    stream = io.StringIO()
    configure_logging("info", stream=stream, pool="intent", worker_id="w1")
    return stream


def events(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


async def test_every_event_is_one_line_of_json_with_the_request_bound(lines: io.StringIO) -> None:
    log = structlog.get_logger("test")

    async def work(name: str) -> None:
        with bind_request(name, traceparent=PARENT, session_id="s"):
            await asyncio.sleep(0)
            log.info("done", tokens=3, text="你好\nx")

    await asyncio.gather(work("r1"), work("r2"))
    log.debug("not shown")
    log.info("after")
    first, second, after = events(lines)
    assert {first["request_id"], second["request_id"]} == {"r1", "r2"}
    assert first["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert (first["event"], first["tokens"], first["pool"], first["level"]) == ("done", 3, "intent", "info")
    assert "request_id" not in after


def test_events_of_libraries_and_exceptions_are_json_too(lines: io.StringIO) -> None:
    logging.getLogger("some.library").warning("%s failed", "it")
    try:
        raise ValueError("why")
    except ValueError:
        structlog.get_logger("test").exception("broken")
    library, broken = events(lines)
    assert (library["event"], library["logger"], library["worker_id"]) == ("it failed", "some.library", "w1")
    assert "ValueError: why" in str(broken["exception"])


def test_a_kafka_client_without_kafka_does_not_fill_the_log(lines: io.StringIO) -> None:
    for _ in range(400):
        logging.getLogger("aiokafka").error("Unable connect to node with id %s", 1)
    assert len(events(lines)) == 1


def test_an_unknown_level_is_named() -> None:
    with pytest.raises(ConfigError, match="log_level"):
        configure_logging("loud")


def test_a_child_keeps_the_trace_and_has_its_own_span() -> None:
    parent, child = parse_traceparent(PARENT), parse_traceparent(child_traceparent(PARENT))
    assert parent is not None
    assert child is not None
    assert str(parent) == PARENT
    assert (child.trace_id, child.is_sampled) == (parent.trace_id, True)
    assert child.span_id != parent.span_id


@pytest.mark.parametrize(
    "text", [None, "", "junk", PARENT.upper(), PARENT.replace("00-4", "01-4"), f"00-{'0' * 32}-{'1' * 16}-01"]
)
def test_a_malformed_traceparent_starts_a_new_trace(text: str | None) -> None:
    assert parse_traceparent(text) is None
    assert parse_traceparent(child_traceparent(text)) is not None
    assert parse_traceparent(str(new_trace())) is not None


def test_metrics_are_served_on_loopback_with_pool_and_colour() -> None:
    metrics = Metrics(pool="generation", colour="blue")
    metrics.generation_tokens.inc(5)
    metrics.num_requests_running.set(2)
    metrics.time_to_first_token.observe(0.2)
    metrics.count_end("stop")
    with serve_metrics(metrics.registry, 0) as server:
        with urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=5) as response:
            text = response.read().decode()
        with pytest.raises(ConfigError, match="cannot be opened"):
            serve_metrics(metrics.registry, server.port)
    assert 'gea_generation_tokens_total{colour="blue",pool="generation"} 5.0' in text
    assert 'gea_request_success_total{colour="blue",finished_reason="stop",pool="generation"} 1.0' in text
    assert 'gea_time_to_first_token_seconds_count{colour="blue",pool="generation"} 1.0' in text
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", server.port)) != 0
