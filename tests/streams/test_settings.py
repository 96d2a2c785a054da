"""Settings are checked where they are made, and say which key is wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from schemas.errors import ConfigError
from streams.settings import BrokerSettings, ConsumerLimits, Protocol, Security, StoreSettings, Timeouts, Tls


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda: Timeouts(request_ms=10_001), "timeouts.request_ms"),
        (lambda: Timeouts(send_ms=9_000), "timeouts.send_ms"),
        (lambda: Timeouts(heartbeat_ms=5_000), "timeouts.heartbeat_ms"),
        (lambda: Timeouts(max_poll_interval_ms=True), "timeouts.max_poll_interval_ms"),
        (lambda: ConsumerLimits(batch_size=0), "consumer.batch_size"),
        (lambda: ConsumerLimits(batch_size=8, max_in_flight=7), "consumer.max_in_flight"),
        (lambda: ConsumerLimits(window=0), "consumer.window"),
        (lambda: BrokerSettings(bootstrap="localhost"), "kafka.bootstrap"),
        (lambda: BrokerSettings(bootstrap="a:9092,b:99999"), "kafka.bootstrap"),
        (lambda: Security(protocol=Protocol.SASL_SSL), "security.username"),
        (lambda: Security(protocol=Protocol.SASL_SSL, mechanism="X", username="u", password="p"), "security.mechanism"),
        (lambda: Tls(key_file="k.pem"), "tls.key_file"),
        (lambda: StoreSettings(url="http://localhost"), "store.url"),
        (lambda: StoreSettings(url="redis://localhost", timeout_ms=0), "store.timeout_ms"),
    ],
)
def test_a_bad_value_is_named(make: Callable[[], object], key: str) -> None:
    with pytest.raises(ConfigError, match=key):
        make()


def test_passwords_are_in_no_repr() -> None:
    security = Security(protocol=Protocol.SASL_SSL, username="u", password="secret")
    settings = BrokerSettings(bootstrap="a:9092, b:9093", security=security)
    assert "secret" not in repr(settings)
    assert "secret" not in repr(StoreSettings(url="redis://u:secret@localhost", state_url="redis://u:secret@other"))
