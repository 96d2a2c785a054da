"""How long a request is wanted: until it is cancelled, its readers are gone, or its deadline has passed.

Every pool asks the same question at the same places: when a request comes, and while it waits for something.
"""

from __future__ import annotations

import asyncio
from typing import TypeVar

from schemas.envelope import RoutedRequest
from schemas.errors import DeadlineExceededError
from streams.cancellations import Cancellations
from streams.clock import now_ms

T = TypeVar("T")


def check_deadline(routed: RoutedRequest) -> None:
    """Raise DeadlineExceededError if the request's time is over."""
    late_ms = now_ms() - routed.deadline_ms
    if late_ms >= 0:
        raise DeadlineExceededError(f"deadline_ms: passed {late_ms} ms ago", field="deadline_ms")


def check_wanted(routed: RoutedRequest, cancellations: Cancellations) -> None:
    """Raise RequestCancelledError or DeadlineExceededError if nobody waits for the request any more."""
    if cancellations.is_cancelled(routed.request_id, routed.tenant):
        raise cancellations.error(routed.request_id, routed.tenant)
    check_deadline(routed)


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
        cancelling = asyncio.create_task(cancelled.wait())
        try:
            left_s = min(timeout_s, seconds_left(routed))
            await asyncio.wait((work, cancelling), timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            cancelling.cancel()
        check_wanted(routed, cancellations)
    if not work.done():
        raise TimeoutError(f"not done in {timeout_s:g} s")
    return work.result()
