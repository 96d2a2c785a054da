"""How to reach Kafka and Redis, how long to wait for them, and how much to take at once.

Values only: nothing here connects or reads the environment. Every setting is checked where it is made; ConfigError
names the key and its range.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from schemas.errors import ConfigError


class Protocol(StrEnum):
    """How the bytes to Kafka are protected, in Kafka's words."""

    PLAINTEXT = "PLAINTEXT"
    """Neither encrypted nor authenticated."""
    SSL = "SSL"
    """TLS, authenticated by certificate if one is given."""
    SASL_PLAINTEXT = "SASL_PLAINTEXT"
    """Authenticated, not encrypted."""
    SASL_SSL = "SASL_SSL"
    """TLS and SASL."""


SASL_MECHANISMS = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Files in PEM form. Without `ca_file` the system's authorities count; `key_file` needs `cert_file`."""

    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    is_hostname_checked: bool = True

    def __post_init__(self) -> None:
        if self.key_file is not None and self.cert_file is None:
            raise ConfigError("tls.key_file: needs tls.cert_file")


@dataclass(frozen=True, slots=True, kw_only=True)
class Security:
    """Who we are to Kafka and how the way is protected. The password is in no repr."""

    protocol: Protocol = Protocol.PLAINTEXT
    mechanism: str = "SCRAM-SHA-512"
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: Tls = Tls()

    def __post_init__(self) -> None:
        if self.protocol not in list(Protocol):
            raise ConfigError(f"security.protocol: {self.protocol!r} is not allowed: {', '.join(Protocol)}")
        if self.is_sasl:
            if self.mechanism not in SASL_MECHANISMS:
                allowed = ", ".join(SASL_MECHANISMS)
                raise ConfigError(f"security.mechanism: {self.mechanism!r} is not allowed: {allowed}")
            if not self.username or self.password is None:
                raise ConfigError("security.username: SASL needs a user name and a password")

    @property
    def is_sasl(self) -> bool:
        """Return whether we say who we are by SASL."""
        return self.protocol in (Protocol.SASL_PLAINTEXT, Protocol.SASL_SSL)

    @property
    def is_tls(self) -> bool:
        """Return whether the way is encrypted."""
        return self.protocol in (Protocol.SSL, Protocol.SASL_SSL)


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerSettings:
    """A Kafka cluster: `bootstrap` is `host:port` of one or more of its brokers, separated by commas."""

    bootstrap: str
    security: Security = Security()
    client_id: str = "gea"

    def __post_init__(self) -> None:
        for address in self.bootstrap.split(","):
            host, _, port = address.strip().rpartition(":")
            if not (host and port.isascii() and port.isdigit() and 1 <= int(port) <= 65_535):
                raise ConfigError(f"kafka.bootstrap: {address!r} is no host:port with a port of 1 to 65535")
        if not self.client_id:
            raise ConfigError("kafka.client_id: must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """Upper bounds in milliseconds for everything that waits for Kafka.

    `send_ms` lies above `request_ms`, so that a send that outlives it shows a stuck client, which is then rebuilt.
    """

    request_ms: int = 10_000
    send_ms: int = 15_000
    close_ms: int = 5_000
    session_ms: int = 8_000  # below `request_ms`: a join waits that long for a member that died
    heartbeat_ms: int = 250  # so late a member notices that another has left, whose partitions wait meanwhile
    rebalance_ms: int = 30_000
    max_poll_interval_ms: int = 300_000

    def __post_init__(self) -> None:
        check_range("timeouts.request_ms", self.request_ms, 100, 10_000)
        check_range("timeouts.send_ms", self.send_ms, self.request_ms, 120_000)
        check_range("timeouts.close_ms", self.close_ms, 100, 60_000)
        check_range("timeouts.session_ms", self.session_ms, 1_000, 1_800_000)
        check_range("timeouts.heartbeat_ms", self.heartbeat_ms, 100, self.session_ms // 2)
        check_range("timeouts.rebalance_ms", self.rebalance_ms, self.session_ms, 600_000)
        check_range("timeouts.max_poll_interval_ms", self.max_poll_interval_ms, self.session_ms, 86_400_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerLimits:
    """How a pool takes its records.

    A batch is handed out when `batch_size` records wait or `max_wait_ms` have passed since the first. At most
    `max_in_flight` records are received and unfinished; a partition pauses where these span `window` offsets. A member
    that shows no life for `stuck_ms` although the broker answers is replaced.
    """

    batch_size: int = 8
    max_wait_ms: int = 20
    max_in_flight: int = 64
    window: int = 256
    commit_interval_ms: int = 1_000
    poll_timeout_ms: int = 250
    stuck_ms: int = 60_000  # twice the longest rebalance

    def __post_init__(self) -> None:
        check_range("consumer.batch_size", self.batch_size, 1, 4_096)
        check_range("consumer.max_wait_ms", self.max_wait_ms, 0, 60_000)
        check_range("consumer.max_in_flight", self.max_in_flight, self.batch_size, 65_536)
        check_range("consumer.window", self.window, 1, 1_000_000)
        check_range("consumer.commit_interval_ms", self.commit_interval_ms, 1, 60_000)
        check_range("consumer.poll_timeout_ms", self.poll_timeout_ms, 1, 5_000)
        check_range("consumer.stuck_ms", self.stuck_ms, 10, 86_400_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Redis or Valkey. `url` is the evictable one, `state_url` the one without eviction; None: the same server.

    The URLs may hold passwords and are in no repr.
    """

    url: str = field(repr=False)
    state_url: str | None = field(default=None, repr=False)
    timeout_ms: int = 500
    tls: Tls = Tls()

    def __post_init__(self) -> None:
        for key, url in (("url", self.url), ("state_url", self.state_url)):
            if url is not None and not url.startswith(("redis://", "rediss://", "unix://")):
                raise ConfigError(f"store.{key}: must begin with redis://, rediss:// or unix://")
        check_range("store.timeout_ms", self.timeout_ms, 10, 10_000)


def check_range(key: str, value: int, low: int, high: int) -> None:
    """Raise ConfigError that names `key` and the range unless `value` lies in it."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{key}: {value!r} is not allowed: {low} to {high}")
