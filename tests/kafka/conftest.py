"""One embedded Kafka for the whole run; a broker client per test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from ops.embedded import EmbeddedKafka, MissingPrerequisiteError
from streams.kafka import KafkaBroker
from streams.settings import BrokerSettings, Timeouts

TIMEOUTS = Timeouts(request_ms=5_000, send_ms=6_000, close_ms=3_000, session_ms=1_500, heartbeat_ms=200)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def embedded_kafka(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EmbeddedKafka]:
    """A running broker; the test is skipped where Java or Maven is missing."""
    try:
        async with EmbeddedKafka(tmp_path_factory.mktemp("kafka")) as kafka:
            yield kafka
    except MissingPrerequisiteError as error:
        pytest.skip(str(error))


@pytest.fixture
def bootstrap(embedded_kafka: EmbeddedKafka) -> str:
    """`host:port` of the broker."""
    return embedded_kafka.bootstrap


@pytest_asyncio.fixture
async def broker(bootstrap: str) -> AsyncIterator[KafkaBroker]:
    """A client with short timeouts."""
    async with KafkaBroker(BrokerSettings(bootstrap=bootstrap), TIMEOUTS) as opened:
        yield opened
