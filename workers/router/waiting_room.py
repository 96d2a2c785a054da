"""Where admitted requests wait until the generation pool has room: bounded, fair among tenants, by priority.

Load is shed here: at the door, with the time after which to come back, never by time-outs deep inside. The invariants:
a request that waits is told at once when it is cancelled and at its deadline when that passes; a request that came
again after a worker died is never rejected; a tenant that floods the room makes others wait for turns only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from schemas.errors import RejectedError
from schemas.request import Priority
from streams.cancellations import Cancellations
from streams.clock import now_ms
from streams.racing import end_tasks, racing
from workers.router.fair_queue import FairQueue
from workers.router.room import Room
from workers.wanted import check_wanted

RECHECK_S = 0.01  # room comes with statuses, and without: what was sent counts as answered after a while
MIN_RETRY_AFTER_S = 1.0
MAX_RETRY_AFTER_S = 60.0
USUAL_RETRY_AFTER_S = 2.0  # while nobody knows how fast requests go on


@dataclass(frozen=True, slots=True, kw_only=True)
class RoomLimits:
    """`max_waiting` requests wait at most; while others wait, a tenant holds at most `tenant_share` of the places.

    They go on while the generation pool has less than `max_tokens_per_worker` for each of its workers.
    """

    max_waiting: int = 1_000
    tenant_share: float = 0.5
    max_tokens_per_worker: int = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """A request at the door. `tokens` is what it may cost; `is_takeover`: it may have been admitted before."""

    request_id: str
    tenant: str
    priority: Priority
    tokens: int
    deadline_ms: int
    reader_lease_s: float | None = None
    is_takeover: bool = False


@dataclass(eq=False, slots=True)
class _Place:
    """A place in the room; its turn comes, or it is pushed out by an error."""

    ticket: Ticket
    turn: asyncio.Future[None]


class WaitingRoom:
    """Lets requests on as the room allows. `start` and `close` frame its use."""

    def __init__(
        self, room: Room, *, limits: RoomLimits = RoomLimits(), cancellations: Cancellations | None = None
    ) -> None:
        self._room = room
        self._limits = limits
        self._cancellations = cancellations or Cancellations()
        self._queue: FairQueue[_Place] = FairQueue()
        self._has_waiting = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def start(self) -> None:
        """Begin to let requests on."""
        self._task = asyncio.create_task(self._run(), name="waiting room")

    async def close(self) -> None:
        """Stop; what waits goes on waiting until its task is cancelled. Idempotent."""
        task, self._task = self._task, None
        await end_tasks(task)

    async def turn(self, ticket: Ticket) -> None:
        """Return when the request may go on. Cancel it to leave the room.

        Raises RejectedError at the door, DeadlineExceededError at the deadline, RequestCancelledError at once.
        """
        watching = self._cancellations.watch(ticket.request_id, ticket.tenant, lease_s=ticket.reader_lease_s)
        with watching as cancelled:
            check_wanted(ticket, self._cancellations)
            if not len(self._queue) and self._room.has_room():
                self._room.send(ticket.tokens, is_limited=False)
                return
            self._check_door(ticket)
            place = _Place(ticket, asyncio.get_running_loop().create_future())
            self._queue.push(place, tenant=ticket.tenant, priority=ticket.priority, tokens=ticket.tokens)
            self._has_waiting.set()
            try:
                left_s = max(0.0, (ticket.deadline_ms - now_ms()) / 1000)
                async with racing(cancelled.wait(), beside=(place.turn,), timeout_s=left_s):
                    pass
            finally:
                if not self._queue.remove(place, tenant=ticket.tenant, priority=ticket.priority):
                    place.turn.exception()  # looked at, even if nobody waits for it any more
            if place.turn.done():
                place.turn.result()
            check_wanted(ticket, self._cancellations)

    def _check_door(self, ticket: Ticket) -> None:
        """Raise RejectedError for who may not wait. A full room makes place for a tenant that holds less of it."""
        if ticket.is_takeover:
            return
        ahead = self._queue.tokens_ahead(tenant=ticket.tenant, priority=ticket.priority)
        rate = self._room.tokens_per_s()
        if rate is not None and ahead / rate > (ticket.deadline_ms - now_ms()) / 1000:
            raise self._rejection(f"its turn would come in {ahead / rate:.0f} s, after its deadline")
        num_own = self._queue.num_of(ticket.tenant)
        has_others = self._queue.num_tenants > (num_own > 0)
        max_own = max(1, int(self._limits.tenant_share * self._limits.max_waiting))
        if has_others and num_own >= max_own:
            raise self._rejection(f"{num_own} requests of the tenant wait, at most {max_own} may while others wait")
        if len(self._queue) >= self._limits.max_waiting and not self._push_out(num_own):
            raise self._rejection(f"{len(self._queue)} requests wait, at most {self._limits.max_waiting} may")

    def _push_out(self, num_own: int) -> bool:
        """Reject the newest request of the tenant that holds the most; False if that is no more than a newcomer's."""
        largest = self._queue.largest_tenant()
        if largest is None or self._queue.num_of(largest) <= num_own + 1:
            return False
        place = next((each for each in self._queue.items_of(largest) if not each.ticket.is_takeover), None)
        if place is None:
            return False
        self._queue.remove(place, tenant=largest, priority=place.ticket.priority)
        num_waiting = len(self._queue) + 1
        place.turn.set_exception(self._rejection(f"{num_waiting} requests wait, most of them of the same tenant"))
        return True

    def _rejection(self, reason: str) -> RejectedError:
        rate = self._room.tokens_per_s()
        retry_after_s = self._queue.tokens / rate if rate else USUAL_RETRY_AFTER_S
        return RejectedError(reason, retry_after_s=min(MAX_RETRY_AFTER_S, max(MIN_RETRY_AFTER_S, retry_after_s)))

    async def _run(self) -> None:
        while True:
            await self._has_waiting.wait()
            while len(self._queue):
                self._let_on()
                await asyncio.sleep(RECHECK_S)
            self._has_waiting.clear()

    def _let_on(self) -> None:
        while len(self._queue) and self._room.has_room():
            place = self._queue.pop()
            assert place is not None
            self._room.send(place.ticket.tokens, is_limited=True)
            place.turn.set_result(None)
