"""Looks at consumer groups from outside: who is in, and what is committed. For operators and benches.

Joins no group and commits nothing. The connection is held, since it may be asked many times a second.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.errors import for_code

from schemas.errors import BrokerUnavailableError
from streams.broker import TopicPartition
from streams.kafka_client import client_options, our_place, translated
from streams.settings import BrokerSettings, Timeouts


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupView:
    """A group as its coordinator sees it. `state` is Kafka's word; `members` are client ids by Kafka's member id.

    A member that died stands there, under a member id of its own, until its session is over.
    """

    state: str
    members: Mapping[str, str]


class KafkaGroups:
    """Asks about groups; `async with` closes the connection, which is made on first use and after a failure."""

    def __init__(self, settings: BrokerSettings, timeouts: Timeouts | None = None) -> None:
        self._settings = settings
        self._timeouts = timeouts or Timeouts()
        self._admin: Any = None
        self._asking = asyncio.Lock()

    async def view(self, group: str) -> GroupView:
        """Return who is in a group; an unknown group is `Dead` and empty. Raises BrokerUnavailableError."""
        async with self._connected("ask for a group") as admin:
            (answer,) = await admin.describe_consumer_groups([group])
            ((code, _, state, _, _, members, *_),) = answer.groups
            if code:
                raise for_code(code)(f"group {group}")
        return GroupView(state=state, members={member_id: client_id for member_id, client_id, *_ in members})

    async def committed(self, group: str) -> Mapping[TopicPartition, int]:
        """Return the committed offsets of a group. Raises BrokerUnavailableError."""
        async with self._connected("ask for committed offsets") as admin:
            found = await admin.list_consumer_group_offsets(group)
        return {our_place(place): each.offset for place, each in found.items() if each.offset >= 0}

    async def close(self) -> None:
        """Close. Idempotent."""
        admin, self._admin = self._admin, None
        if admin is not None:
            with translated("close"):
                await admin.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    @asynccontextmanager
    async def _connected(self, action: str) -> AsyncIterator[Any]:
        async with self._asking:
            try:
                with translated(action):
                    async with asyncio.timeout(self._timeouts.request_ms / 1000):
                        if self._admin is None:
                            self._admin = AIOKafkaAdminClient(**client_options(self._settings, self._timeouts))
                            await self._admin.start()
                        yield self._admin
            except BrokerUnavailableError:
                await self.close()
                raise
