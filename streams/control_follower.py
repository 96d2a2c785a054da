"""Follows the topic of control in no group, and tells a worker's `Cancellations` what it says.

Every worker reads every record: a request may be anywhere. Records older than the longest deadline concern nobody who
still lives, so they are skipped. A topic that cannot be read stops no work: cancels then come late, and no reader
counts as gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

import structlog

from schemas.control import ControlKind
from schemas.errors import BrokerUnavailableError, ConfigError
from streams.broker import Broker, Record, TopicPartition
from streams.cancellations import Cancellations
from streams.clock import now_ms
from streams.control import read_control
from streams.follower import TopicFollower
from streams.racing import end_tasks
from streams.topics import CONTROL

CHECK_S = 0.25  # a quarter of the shortest lease
MAX_ANSWER_S = 1.0  # an answer that takes longer is a sign that readers could not be heard either
MAX_LAG_S = 0.5  # who wakes up later was paused: what readers said meanwhile is still to be read

log = structlog.get_logger(__name__)


class ControlFollower:
    """Feeds one `Cancellations`. `async with` starts and stops it; see `catch_up`. `clock_ms` is the Unix time."""

    def __init__(
        self,
        broker: Broker,
        cancellations: Cancellations,
        *,
        topic: str = CONTROL,
        check_s: float = CHECK_S,
        clock_ms: Callable[[], int] = now_ms,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cancellations = cancellations
        self._follower = TopicFollower(broker, topic, self._take)
        self._check_s = check_s
        self._clock_ms = clock_ms
        self._clock = clock
        self._checking: asyncio.Task[None] | None = None

    @property
    def num_skipped(self) -> int:
        """Return how many records were no sayings."""
        return self._follower.num_skipped

    async def catch_up(self, timeout_s: float) -> bool:
        """Wait until everything said so far is known; False if that takes too long. It goes on either way."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._follower.caught_up.wait()
        except TimeoutError:
            log.warning("control_not_read", topic=self._follower.topic, waited_s=timeout_s)
            return False
        return True

    async def __aenter__(self) -> Self:
        self._follower.start_soon()
        self._checking = asyncio.create_task(self._check_forever(), name="reader leases")
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Stop. Idempotent."""
        task, self._checking = self._checking, None
        await end_tasks(task)
        await self._follower.close()

    def _take(self, record: Record, *, is_live: bool) -> None:
        if self._clock_ms() - record.timestamp_ms > self._cancellations.max_age_s * 1000 and not is_live:
            return
        control = read_control(record)
        match control.kind:
            case ControlKind.CANCEL:
                log.info("cancel_received", request_id=control.request_id, tenant=control.tenant, reason=control.reason)
                self._cancellations.cancel(control.request_id, control.tenant, control.reason)
            case ControlKind.ALIVE if is_live:  # what was said before we listened is covered by our beginning anew
                self._cancellations.leases.alive((control.request_id, control.tenant))

    async def _check_forever(self) -> None:
        """Let leases lapse, but only while we have surely read what the topic held a moment ago."""
        ends: Mapping[TopicPartition, int] | None = None
        leases = self._cancellations.leases
        while True:
            slept_at = self._clock()
            await asyncio.sleep(self._check_s)
            was_paused = self._clock() - slept_at > self._check_s + MAX_LAG_S
            leases.hear(ends is not None and not was_paused and self._follower.has_reached(ends))
            leases.check()
            ends = await self._ask_ends() if leases.num_held else None

    async def _ask_ends(self) -> Mapping[TopicPartition, int] | None:
        asked_at = self._clock()
        try:
            ends = await self._follower.end_offsets()
        except (BrokerUnavailableError, ConfigError):
            return None
        return ends if self._clock() - asked_at <= MAX_ANSWER_S else None
