"""What the bench configures its workers with."""

from __future__ import annotations

import msgspec

from ops.bench.chaos.stack import PRODUCTION, SHORT, Size, configuration
from workers.settings import KafkaSection, Settings


def kafka_of(size: Size) -> KafkaSection:
    return msgspec.convert(configuration(size, "h:1", "redis://h:2"), Settings).kafka


def test_production_sessions_are_the_defaults_of_the_settings() -> None:
    found, default = kafka_of(Size(sessions=PRODUCTION)), KafkaSection()
    for name in ("session_timeout_ms", "heartbeat_interval_ms", "request_timeout_ms"):
        assert getattr(found, name) == getattr(default, name), name


def test_short_sessions_notice_a_death_sooner() -> None:
    short, production = kafka_of(Size(sessions=SHORT)), kafka_of(Size(sessions=PRODUCTION))
    assert short.session_timeout_ms < production.session_timeout_ms
    assert short.request_timeout_ms < production.request_timeout_ms
