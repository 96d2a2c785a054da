"""What every aiokafka client here shares: options from settings, errors translated to ours, and a bounded stop.

This is the one boundary for Kafka's errors. The invariant: nothing waits for a broker without a limit.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Mapping
from ssl import SSLContext, SSLError
from types import TracebackType
from typing import Any

import structlog
from aiokafka import errors as kafka_errors
from aiokafka.helpers import create_ssl_context
from aiokafka.structs import TopicPartition as KafkaPlace

from schemas.errors import BrokerUnavailableError, ConfigError, InvalidRequestError
from streams.broker import Record, TopicPartition
from streams.settings import BrokerSettings, Security, Timeouts

log = structlog.get_logger(__name__)

TOO_LARGE = (
    kafka_errors.MessageSizeTooLargeError,
    kafka_errors.RecordListTooLargeError,
    kafka_errors.RecordTooLargeError,
)
FORBIDDEN = (
    kafka_errors.AuthenticationFailedError,
    kafka_errors.AuthenticationMethodNotSupported,
    kafka_errors.ClusterAuthorizationFailedError,
    kafka_errors.GroupAuthorizationFailedError,
    kafka_errors.SaslAuthenticationFailed,
    kafka_errors.TopicAuthorizationFailedError,
    kafka_errors.UnsupportedSaslMechanismError,
)
BOOTSTRAP_PLACE = re.compile(r"\('([^']+)', (\d+)")  # in aiokafka's "Unable to bootstrap from [('host', 9092, …)]"
ABANDON_S = 1.0  # for each step of taking a stuck client apart


def client_options(settings: BrokerSettings, timeouts: Timeouts, client_id: str | None = None) -> dict[str, Any]:
    """Return the options that producers, consumers and admin clients have in common."""
    security = settings.security
    options: dict[str, Any] = {
        "bootstrap_servers": settings.bootstrap,
        "client_id": client_id or settings.client_id,
        "request_timeout_ms": timeouts.request_ms,
        "security_protocol": str(security.protocol),
    }
    if security.is_tls:
        options["ssl_context"] = _tls_context(security)
    if security.is_sasl:
        options["sasl_mechanism"] = security.mechanism
        options["sasl_plain_username"] = security.username
        options["sasl_plain_password"] = security.password
    return options


def _tls_context(security: Security) -> SSLContext:
    tls = security.tls
    try:
        context: SSLContext = create_ssl_context(cafile=tls.ca_file, certfile=tls.cert_file, keyfile=tls.key_file)
    except (OSError, SSLError) as error:
        raise ConfigError(f"security.tls: {error}") from error
    context.check_hostname = tls.is_hostname_checked
    return context


class translated:  # noqa: N801  # reads as a statement, like contextlib.suppress
    """Turn Kafka's errors into ours: too large, forbidden, or unavailable."""

    __slots__ = ("_action",)

    def __init__(self, action: str) -> None:
        self._action = action

    def __enter__(self) -> None: ...

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(exc, TOO_LARGE):
            raise InvalidRequestError(f"{self._action}: the record is too large: {exc}") from exc
        if isinstance(exc, FORBIDDEN):
            raise ConfigError(f"{self._action}: Kafka refuses us: {_text(exc)}") from exc
        if isinstance(exc, TimeoutError):
            raise BrokerUnavailableError(f"{self._action}: Kafka did not answer in time") from exc
        if isinstance(exc, (kafka_errors.KafkaError, kafka_errors.ConsumerStoppedError, OSError)):
            raise BrokerUnavailableError(f"{self._action}: {_text(exc)}") from exc


def _text(error: BaseException) -> str:
    if "bootstrap" in str(error):  # aiokafka tells the cause in its log only
        places = ", ".join(f"{host}:{port}" for host, port in BOOTSTRAP_PLACE.findall(str(error))) or str(error)
        return f"no connection to Kafka at {places}: does it run there, and do protocol, login and certificate fit?"
    name = type(error).__name__
    return str(error) if str(error).startswith(name) else f"{name}: {error}"


async def stop_consumer(consumer: Any, close_ms: int) -> None:
    """Stop a consumer in bounded time, whatever state it is in; a stuck one leaves its group all the same."""

    async def leave_nothing() -> None:
        if consumer._coordinator is not None and consumer._group_id is not None:
            consumer._coordinator._coordination_task.cancel()
            await _within(ABANDON_S, consumer._coordinator._stop_heartbeat_task)
            await _within(ABANDON_S, consumer._coordinator._stop_commit_offsets_refresh_task)
            await _within(ABANDON_S, consumer._coordinator._maybe_leave_group)
        if consumer._fetcher is not None:
            await _within(ABANDON_S, consumer._fetcher.close)
        await _within(ABANDON_S, consumer._client.close)

    if not await _within(close_ms / 1000, consumer.stop):
        await leave_nothing()


async def stop_producer(producer: Any, close_ms: int) -> None:
    """Flush and stop a producer in bounded time; what was not acknowledged by then may be lost, and its sends fail."""
    if not await _within(close_ms / 1000, producer.stop):
        await _within(ABANDON_S, producer._sender.close)
        producer._message_accumulator.fail_all(kafka_errors.ProducerClosed())
        await _within(ABANDON_S, producer.client.close)


async def _within(timeout_s: float, stop: Callable[[], Awaitable[None]]) -> bool:
    task = asyncio.current_task()
    assert task is not None
    num_cancels = task.cancelling()
    try:
        async with asyncio.timeout(timeout_s):
            await stop()
    except (TimeoutError, kafka_errors.KafkaError, OSError) as error:
        log.warning("kafka_stop_failed", error=_text(error))
        return False
    except asyncio.CancelledError:
        if task.cancelling() > num_cancels:
            raise
        return False  # not ours: aiokafka lets that of a task of its own through, if it had not begun yet
    return True


def our_place(place: Any) -> TopicPartition:
    """Return Kafka's partition as ours."""
    return TopicPartition(place.topic, place.partition)


def kafka_place(place: TopicPartition) -> Any:
    """Return our partition as Kafka's."""
    return KafkaPlace(place.topic, place.partition)


def our_records(fetched: Mapping[Any, list[Any]]) -> list[Record]:
    """Return fetched records as ours."""
    return [
        Record(
            topic=record.topic,
            partition=record.partition,
            offset=record.offset,
            timestamp_ms=record.timestamp,
            key=record.key,
            value=record.value,
            headers=tuple([(name, value or b"") for name, value in record.headers]) if record.headers else (),
        )
        for records in fetched.values()
        for record in records
    ]
