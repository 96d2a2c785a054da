"""How long a request is wanted: until it is cancelled, its readers are gone, or its deadline has passed.

Every pool asks the same question at the same places: when a request comes, and while it waits for something.
"""

from __future__ import annotations

import asyncio
from typing import Protocol, TypeVar

from schemas.envelope import RoutedRequest
from schemas.errors import DeadlineExceededError
from streams.cancellations import Cancellations
from streams.clock import now_ms
from streams.racing import racing

T = TypeVar("T")


class Wanted(Protocol):
    """A request, at the door or on its way."""

    @property
    def request_id(self) -> str: ...

    @property
    def tenant(self) -> str: ...

    @property
    def deadline_ms(self) -> int: ...


def check_deadline(deadline_ms: int, at_ms: int) -> None:
    """Raise DeadlineExceededError if a deadline has come at a time; both are Unix times in milliseconds."""
    if at_ms >= deadline_ms:
        raise DeadlineExceededError(f"deadline_ms: passed {at_ms - deadline_ms} ms ago", field="deadline_ms")


def check_wanted(request: Wanted, cancellations: Cancellations) -> None:
    """Raise RequestCancelledError or DeadlineExceededError if nobody waits for the request any more."""
    if cancellations.is_cancelled(request.request_id, request.tenant):
        raise cancellations.error(request.request_id, request.tenant)
    check_deadline(request.deadline_ms, now_ms())


def seconds_left(routed: RoutedRequest) -> float:
    """Return the seconds until the request's deadline, 0 if it has passed."""
    return max(0.0, (routed.deadline_ms - now_ms()) / 1000)


async def while_wanted(
    work: asyncio.Future[T], routed: RoutedRequest, cancellations: Cancellations, *, timeout_s: float
) -> T:
    """Wait for work that others may wait for too: it goes on when we give up.

    Raises TimeoutError after `timeout_s`, and as soon as nobody waits for the request, RequestCancelledError or
    DeadlineExceededError, even if the work was done meanwhile.
    """
    lease_s = routed.request.reader_lease_s
    with cancellations.watch(routed.request_id, routed.tenant, lease_s=lease_s) as cancelled:
        left_s = min(timeout_s, seconds_left(routed))
        async with racing(cancelled.wait(), beside=(work,), timeout_s=left_s):
            check_wanted(routed, cancellations)
    if not work.done():
        raise TimeoutError(f"not done in {timeout_s:g} s")
    return work.result()
