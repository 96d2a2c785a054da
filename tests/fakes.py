"""Tiny stand-ins that several tests share. No mocks of our own code."""

from __future__ import annotations


class FakeClock:
    """A clock that moves only when told. Call it for the time in milliseconds."""

    def __init__(self, now_ms: int = 1_700_000_000_000) -> None:
        self.now_ms = now_ms

    def __call__(self) -> int:
        return self.now_ms

    def advance(self, ms: int) -> None:
        """Move on by `ms`."""
        self.now_ms += ms
