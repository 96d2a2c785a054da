"""What stops a part of an installation at a point, until the test lets it go on."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from streams.answer import Answer
from streams.broker import LogReader, TopicPartition
from streams.client import GeaClient
from streams.topics import TOKENS
from tests.flow.harness import DIALOGUE, Installation
from workers.generation.engine.fake import FakeEngine

TEXT = "A long answer that a worker may not live to finish."


class Gate:
    """A pace for the scripted engine: it goes on freely up to token `stop_at`, then waits to be opened."""

    def __init__(self, stop_at: int) -> None:
        self.reached = asyncio.Event()
        self.opened = asyncio.Event()
        self.passed = asyncio.Event()
        self._left = stop_at

    async def __call__(self) -> None:
        self._left -= 1
        if self._left < 0:
            self.reached.set()
            await self.opened.wait()
            self.passed.set()
        await asyncio.sleep(0)


async def answering(gea: Installation, client: GeaClient, gate: Gate) -> asyncio.Task[Answer]:
    """Start a worker of each pool and ask; the answer, which is `TEXT`, stands still at the gate."""
    await gea.start_all(FakeEngine(TEXT, pause=gate))
    asking = asyncio.create_task(client.complete("tell me", request_id="r-1", **DIALOGUE))
    await gate.reached.wait()
    return asking


class HeldReads:
    """Holds whoever opens a reader on the token topic."""

    def __init__(self, gea: Installation, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached = asyncio.Event()
        self._opened = asyncio.Event()
        self._open = gea.broker.reader
        self._patch = monkeypatch
        monkeypatch.setattr(gea.broker, "reader", self._held)
        self._gea = gea

    def release(self) -> None:
        self._opened.set()
        self._patch.setattr(self._gea.broker, "reader", self._open)

    async def _held(self, places: Mapping[TopicPartition, int | None]) -> LogReader:
        if any(place.topic == TOKENS for place in places):
            self.reached.set()
            await self._opened.wait()
        return await self._open(places)
