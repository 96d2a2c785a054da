"""Which partition of the next pool's topic a request goes to, where its key does not decide."""

from __future__ import annotations

from typing import Protocol

from schemas.envelope import RoutedRequest


class Placement(Protocol):
    """Chooses partitions. Never waits: it decides by what is known."""

    def partition(self, topic: str, routed: RoutedRequest) -> int | None:
        """Return the partition for a request, None to let its key decide (turns of a session stay together)."""
        ...
