"""Kafka that is not there: every call fails soon and says so."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Iterator

import pytest

from schemas.errors import BrokerUnavailableError, ConfigError
from streams.broker import Assignment, TopicPartition
from streams.kafka import KafkaBroker
from streams.settings import BrokerSettings, Protocol, Security, Timeouts, Tls

QUICK = Timeouts(request_ms=500, send_ms=500, close_ms=300, session_ms=1_000, heartbeat_ms=100, rebalance_ms=1_000)


async def ignore_revoked(_: frozenset[TopicPartition]) -> None:
    return None


async def ignore_assigned(_: Assignment) -> None:
    return None


CALLS: list[Callable[[KafkaBroker], Awaitable[object]]] = [
    lambda broker: broker.producer(),
    lambda broker: broker.reader({TopicPartition("t", 0): 0}),
    lambda broker: broker.reader({TopicPartition("t", 0): None}),
    lambda broker: broker.partitions("t"),
    lambda broker: broker.create_topics([]),
    lambda broker: broker.group_consumer(
        ["t"], group="g", member="m", on_revoked=ignore_revoked, on_assigned=ignore_assigned
    ),
]


@pytest.fixture(params=["refused", "silent"])
def address(request: pytest.FixtureRequest) -> Iterator[str]:
    """A port that nobody listens on, or where nobody answers."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if request.param == "silent":
            server.listen(64)
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("call", CALLS, ids=["producer", "reader", "end reader", "partitions", "create", "group"])
async def test_a_broker_that_does_not_answer_is_reported_in_bounded_time(
    address: str, call: Callable[[KafkaBroker], Awaitable[object]]
) -> None:
    async with KafkaBroker(BrokerSettings(bootstrap=address), QUICK) as broker:
        async with asyncio.timeout(6):
            with pytest.raises(BrokerUnavailableError):
                await call(broker)


@pytest.mark.parametrize("address", ["refused"], indirect=True)
async def test_the_address_that_nobody_listens_on_is_named(address: str) -> None:
    async with KafkaBroker(BrokerSettings(bootstrap=address), QUICK) as broker:
        with pytest.raises(BrokerUnavailableError, match=f"no connection to Kafka at {address}: does it run there"):
            await broker.partitions("t")


async def test_a_missing_certificate_is_named() -> None:
    security = Security(protocol=Protocol.SSL, tls=Tls(ca_file="missing.pem"))
    broker = KafkaBroker(BrokerSettings(bootstrap="127.0.0.1:1", security=security))
    with pytest.raises(ConfigError, match=r"security\.tls"):
        await broker.producer()
