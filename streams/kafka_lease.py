"""How long a Kafka group surely keeps counting on a member.

The broker throws a member out when it has heard nothing of it for the session timeout. A sign of life counts from the
moment that it was sent, if it was answered; the margin covers clocks that run at different speeds.
"""

from __future__ import annotations

import time
from typing import Any

from aiokafka.errors import NoError, RebalanceInProgressError, for_code
from aiokafka.protocol.group import HeartbeatRequest, SyncGroupRequest

MARGIN = 0.2  # of the session timeout


class Lease:
    """The lease of one group member, renewed by its heartbeats. `watch` sees them."""

    def __init__(self, session_s: float) -> None:
        self._length_s = session_s * (1 - MARGIN)
        self._renewed_at = float("-inf")
        self._watched: Any = None

    def watch(self, coordinator: Any) -> None:
        """Look on while aiokafka's coordinator talks to the broker. Idempotent."""
        if coordinator is self._watched:
            return
        self._watched = coordinator
        send = coordinator._send_req

        async def send_and_note(request: Any) -> Any:
            sent_at = time.monotonic()
            response = await send(request)
            if isinstance(request, (HeartbeatRequest, SyncGroupRequest)):
                self._note(sent_at, response.error_code)
            return response

        coordinator._send_req = send_and_note

    def is_valid(self) -> bool:
        """Return whether the broker cannot have thrown the member out yet."""
        return time.monotonic() < self._renewed_at + self._length_s

    def _note(self, sent_at: float, error_code: int) -> None:
        if for_code(error_code) in (NoError, RebalanceInProgressError):  # both set the session's clock anew
            self._renewed_at = max(self._renewed_at, sent_at)
