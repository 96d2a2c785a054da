"""From settings to connections and limits: the only place that translates the configuration for `streams`."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from schemas.errors import UnavailableError
from schemas.worker import Pool
from streams.broker import Broker, Producer
from streams.kafka import KafkaBroker
from streams.settings import BrokerSettings, ConsumerLimits, Protocol, Security, StoreSettings, Timeouts, Tls
from streams.token_writer import WriterLimits
from streams.topics import REQUESTS, TOKENS
from workers.settings import KafkaSection, RedisSection, Settings
from workers.suspension import OutlierLimits

RETRY_S = 0.3  # a broker that starts beside us is there within seconds
SLOW_RETRY_S = 3.0
NUM_QUICK_TRIES = 100
LOG_EVERY = 20
WINDOW_PER_WAITING = 4

log = structlog.get_logger(__name__)


def broker_settings(kafka: KafkaSection, *, client_id: str = "gea") -> BrokerSettings:
    """Return how to reach Kafka. Raises ConfigError."""
    tls = _tls(kafka)
    security = Security(
        protocol=Protocol(kafka.security_protocol.value),
        mechanism=kafka.sasl_mechanism or Security().mechanism,
        username=kafka.sasl_username,
        password=kafka.sasl_password,
        tls=tls,
    )
    return BrokerSettings(bootstrap=kafka.bootstrap, security=security, client_id=client_id)


def timeouts(kafka: KafkaSection) -> Timeouts:
    """Return the bounds of all waiting for Kafka. Raises ConfigError."""
    return Timeouts(
        request_ms=kafka.request_timeout_ms,
        send_ms=kafka.request_timeout_ms + kafka.request_timeout_ms // 2,
        session_ms=kafka.session_timeout_ms,
        heartbeat_ms=kafka.heartbeat_interval_ms,
        rebalance_ms=kafka.rebalance_timeout_ms,
        max_poll_interval_ms=kafka.max_poll_interval_ms,
    )


def kafka_broker(settings: Settings, *, client_id: str = "gea") -> KafkaBroker:
    """Make the broker of the configuration. Raises ConfigError."""
    return KafkaBroker(broker_settings(settings.kafka, client_id=client_id), timeouts(settings.kafka))


def store_settings(redis: RedisSection) -> StoreSettings:
    """Return how to reach Redis. Raises ConfigError."""
    return StoreSettings(url=redis.url, state_url=redis.state_url, timeout_ms=redis.timeout_ms, tls=_tls(redis))


def limits_of(settings: Settings, pool: Pool) -> ConsumerLimits:
    """Return how the workers of a pool take their records."""
    match pool:
        case Pool.ROUTER:
            return router_limits(settings)
        case Pool.INTENT | Pool.RETRIEVAL:
            return consumer_limits(settings)
        case Pool.GENERATION:
            return direct_limits(settings)


def consumer_limits(settings: Settings) -> ConsumerLimits:
    """Return how an annotating pool takes its records: in batches."""
    batching = settings.batching
    return ConsumerLimits(
        batch_size=batching.batch_size,
        max_wait_ms=batching.max_wait_ms,
        max_in_flight=batching.max_in_flight,
        window=batching.window,
        stuck_ms=round(settings.worker.stuck_s * 1000),
    )


def direct_limits(settings: Settings) -> ConsumerLimits:
    """Return how generation takes its records: at once, since it batches inside."""
    batching = settings.batching
    return ConsumerLimits(
        batch_size=1,
        max_wait_ms=0,
        max_in_flight=batching.max_in_flight,
        window=batching.window,
        stuck_ms=round(settings.worker.stuck_s * 1000),
    )


def router_limits(settings: Settings) -> ConsumerLimits:
    """Return how the router takes its records: as many as may wait in it, and some that are on their way.

    One that waits long holds back the commit of those behind it: the window leaves room for what passes it.
    """
    direct = direct_limits(settings)
    return replace(
        direct,
        max_in_flight=settings.router.max_waiting + settings.batching.max_in_flight,
        window=max(direct.window, WINDOW_PER_WAITING * settings.router.max_waiting),
    )


def outlier_limits(settings: Settings) -> OutlierLimits | None:
    """Return when a worker steps aside, None for never."""
    outlier = settings.outlier
    if not outlier.is_enabled:
        return None
    return OutlierLimits(
        factor=outlier.factor,
        error_rate=outlier.error_rate,
        after_s=outlier.after_s,
        probe_s=outlier.probe_s,
        max_probe_s=outlier.max_probe_s,
    )


def writer_limits(settings: Settings) -> WriterLimits:
    """Return how tokens are grouped into records."""
    stream = settings.stream
    return WriterLimits(
        max_tokens=stream.max_tokens_per_record,
        max_delay_ms=stream.max_delay_ms,
        send_ms=settings.kafka.request_timeout_ms * 2,
    )


async def await_topics(broker: Broker) -> int:
    """Wait until the broker answers and the topics exist; return the partition count of the token topic."""
    attempt = 0
    while True:
        try:
            if await broker.partitions(REQUESTS) and (num_partitions := await broker.partitions(TOKENS)):
                return num_partitions
            reason = "there are no topics yet: `gea topics apply` makes them"
        except UnavailableError as error:
            reason = error.message
        if attempt % LOG_EVERY == 0:
            log.info("waiting_for_broker", broker=broker.name, reason=reason)
        attempt += 1
        await asyncio.sleep(RETRY_S if attempt < NUM_QUICK_TRIES else SLOW_RETRY_S)


async def start_producer(broker: Broker) -> Producer:
    """Make a producer, however long the broker stays away."""
    while True:
        try:
            return await broker.producer()
        except UnavailableError as error:
            log.warning("producer_unavailable", reason=error.message)
        await asyncio.sleep(RETRY_S)


def _tls(section: KafkaSection | RedisSection) -> Tls:
    return Tls(
        ca_file=section.ssl_cafile,
        cert_file=section.ssl_certfile,
        key_file=section.ssl_keyfile,
        is_hostname_checked=section.ssl_check_hostname,
    )
