"""What every broker must do: the same checks run on the in-memory broker and on Kafka.

A test file makes a subclass whose name begins with Test, with a fixture `broker`; `topic` is a fresh name per test.
"""

from __future__ import annotations

from tests.streams.contract_group import GroupContract
from tests.streams.contract_log import LogContract


class BrokerContract(LogContract, GroupContract):
    """The contract."""
