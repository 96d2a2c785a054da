"""Where a command finds Kafka and Redis, and how it connects.

The address comes from, in this order: `--kafka`, an explicit configuration (`--config`, `GEA_CONFIG` or
`GEA_KAFKA_BOOTSTRAP`), the running stack of the given name. Nothing here imports torch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

import ops
from ops.errors import CommandError
from ops.stack import DEFAULT_NAME, StackState, running_stack
from streams.settings import BrokerSettings, Protocol, Security, StoreSettings, Timeouts, Tls
from workers.settings import Settings, load_settings

if TYPE_CHECKING:
    from streams.broker import Broker

PACKAGE = Path(ops.__file__).resolve().parent
DEV_CONFIG = PACKAGE / "config" / "dev.yaml"
BOOTSTRAP_VARIABLE = "GEA_KAFKA_BOOTSTRAP"
CONFIG_VARIABLE = "GEA_CONFIG"


@dataclass(frozen=True, slots=True, kw_only=True)
class Connection:
    """The settings of a command, with the addresses filled in, and the stack they came from."""

    settings: Settings
    stack: StackState | None = None

    @property
    def bootstrap(self) -> str:
        """Where Kafka is."""
        return self.settings.kafka.bootstrap

    def broker(self, client_id: str = "gea-cli") -> Broker:
        """Return a broker, not yet opened."""
        return make_broker(self.settings, client_id)

    def broker_settings(self, client_id: str = "gea-cli") -> BrokerSettings:
        """Return how to reach Kafka, as `GeaClient` takes it."""
        return broker_settings(self.settings, client_id)


def find_connection(
    *, kafka: str | None = None, config: Path | None = None, name: str = DEFAULT_NAME, environ: Mapping[str, str]
) -> Connection:
    """Return where the command should connect.

    Raises CommandError if neither an address is given nor a stack runs, ConfigError for a bad configuration.
    """
    config = config or (Path(environ[CONFIG_VARIABLE]) if environ.get(CONFIG_VARIABLE) else None)
    is_explicit = config is not None or BOOTSTRAP_VARIABLE in environ
    stack = None if kafka or is_explicit else running_stack(name)
    if kafka is None and not is_explicit and stack is None:
        which = "No stack" if name == DEFAULT_NAME else f"No stack {name!r}"
        raise CommandError(f"{which} is running: start one with `gea up`, or name a broker with --kafka host:port")
    if stack is not None and stack.config:
        config = Path(stack.config)
    settings = load_settings(config or DEV_CONFIG, environ)
    bootstrap = kafka or (stack.bootstrap if stack else settings.kafka.bootstrap)
    redis_url = stack.redis_url if stack and stack.redis_url else settings.redis.url
    settings = msgspec.structs.replace(
        settings,
        kafka=msgspec.structs.replace(settings.kafka, bootstrap=bootstrap),
        redis=msgspec.structs.replace(settings.redis, url=redis_url),
    )
    return Connection(settings=settings, stack=stack)


def make_broker(settings: Settings, client_id: str = "gea-cli") -> Broker:
    """Return the broker that the settings name, not yet opened."""
    from streams.kafka import KafkaBroker

    return KafkaBroker(broker_settings(settings, client_id), timeouts(settings))


def broker_settings(settings: Settings, client_id: str) -> BrokerSettings:
    """Translate the configuration into what `streams` wants."""
    kafka = settings.kafka
    security = Security(
        protocol=Protocol(kafka.security_protocol.value),
        mechanism=kafka.sasl_mechanism or Security().mechanism,
        username=kafka.sasl_username,
        password=kafka.sasl_password,
        tls=Tls(ca_file=kafka.ssl_cafile, cert_file=kafka.ssl_certfile, key_file=kafka.ssl_keyfile),
    )
    return BrokerSettings(bootstrap=kafka.bootstrap, security=security, client_id=client_id)


def timeouts(settings: Settings) -> Timeouts:
    """Translate the bounds of every wait for Kafka."""
    kafka = settings.kafka
    return Timeouts(
        request_ms=kafka.request_timeout_ms,
        session_ms=kafka.session_timeout_ms,
        heartbeat_ms=kafka.heartbeat_interval_ms,
        rebalance_ms=kafka.rebalance_timeout_ms,
        max_poll_interval_ms=kafka.max_poll_interval_ms,
    )


def store_settings(settings: Settings) -> StoreSettings:
    """Translate the address of Redis."""
    redis = settings.redis
    tls = Tls(ca_file=redis.ssl_cafile, cert_file=redis.ssl_certfile, key_file=redis.ssl_keyfile)
    return StoreSettings(url=redis.url, state_url=redis.state_url, timeout_ms=redis.timeout_ms, tls=tls)


def config_path(config: Path | None, environ: Mapping[str, str] | None = None) -> Path:
    """Return the configuration of a stack: the given one, else `GEA_CONFIG`, else dev.yaml. Always absolute."""
    environ = os.environ if environ is None else environ
    return (config or Path(environ.get(CONFIG_VARIABLE) or DEV_CONFIG)).expanduser().absolute()
