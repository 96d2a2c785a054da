"""Trying again while the broker is away, in bounded time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from schemas.errors import BrokerUnavailableError
from streams.broker import Broker

T = TypeVar("T")
RETRY_S = 0.1
CUT_OFF = 2  # the last attempt may take as long again: a send that is cut off may have been written
MAX_RETRY_S = 2.0


async def patiently(call: Callable[[], Awaitable[T]], seconds: float, broker: Broker) -> T:
    """Call again while the broker is away, for `seconds` in all. Raises BrokerUnavailableError that names it.

    A call that others hold up is cut off too, after CUT_OFF times that.
    """
    deadline = time.monotonic() + seconds
    pause_s = RETRY_S
    while True:
        try:
            return await _bounded(call, deadline + (CUT_OFF - 1) * seconds - time.monotonic())
        except BrokerUnavailableError as error:
            left = deadline - time.monotonic()
            if left <= pause_s:
                message = f"{broker.name} cannot be reached, tried for {seconds:g} s: {error.message}"
                raise BrokerUnavailableError(message) from error
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_RETRY_S)


async def _bounded(call: Callable[[], Awaitable[T]], seconds: float) -> T:
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            return await call()
    except TimeoutError as error:
        raise BrokerUnavailableError("no answer in time") from error
