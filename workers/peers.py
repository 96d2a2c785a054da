"""The other workers of a pool and colour, as the directory knows them; without a directory there are none."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from schemas.worker import Pool, WorkerState, WorkerStatus
from streams.directory import Directory


class Peers:
    """A worker's view of its pool."""

    def __init__(self, directory: Directory | None, pool: Pool, colour: str, own_id: str) -> None:
        self._directory = directory
        self._pool = pool
        self._colour = colour
        self._own_id = own_id

    def all(self) -> Sequence[WorkerStatus]:
        """Return the workers that live, ourselves too, in any state."""
        return self._directory.workers(self._pool, self._colour, state=None) if self._directory else ()

    def has_ready(self) -> bool:
        """Return whether another worker could take over from us."""
        return any(worker.state is WorkerState.READY and worker.worker_id != self._own_id for worker in self.all())

    async def departed(self) -> None:
        """Wait until a worker has given its partitions up, by leaving or by stepping aside."""
        if self._directory is None:
            await asyncio.Event().wait()
            return
        before = self._owners()
        while not before - (now := self._owners()):
            before = now
            await self._directory.changed()

    def _owners(self) -> frozenset[str]:
        return frozenset(worker.worker_id for worker in self.all() if worker.partitions)
