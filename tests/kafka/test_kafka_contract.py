"""Kafka behind our protocols: the contract, and what only a server does."""

from __future__ import annotations

import pytest

from streams.kafka import KafkaBroker
from tests.streams.contract import BrokerContract
from tests.streams.contract_steps import topic as topic

pytestmark = pytest.mark.kafka


class TestKafkaBroker(BrokerContract):
    """The contract on Kafka."""


async def test_api_versions_are_negotiated(broker: KafkaBroker, capsys: pytest.CaptureFixture[str]) -> None:
    versions = await broker.api_versions()
    with capsys.disabled():
        print(f"\n{broker.name}: " + ", ".join(f"{name} v{version}" for name, version in versions.items()))  # noqa: T201
    assert versions["Produce"] >= 3, "headers need it"
    assert versions["Fetch"] >= 4
