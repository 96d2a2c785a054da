"""Our engine as a process of the comparison, driven through its public protocol like by a worker.

The cache is sized for the run (sequences times context), as every other entrant's. The model folder names no end of
sequence, so no answer stops early.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from pathlib import Path
from typing import Any

from ops.bench.engine.entrant import Arrivals, Turn, serve
from workers.generation.engine.loader import Loaded, load
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import EngineRequest, Precision, SamplingParams, TokenChunk
from workers.generation.engine.settings import LocalEngineSettings


def settings_for(command: dict[str, Any]) -> LocalEngineSettings:
    """Return the defaults, with what the run needs of sequences, context and cache."""
    defaults = LocalEngineSettings()
    room = defaults.block_size  # the last token of an answer is drawn, never read
    tokens = -(-(command["context"] + room) // defaults.block_size) * defaults.block_size
    return LocalEngineSettings(
        max_sequences=command["num_sequences"],
        max_context=command["context"] + room,
        kv_cache_tokens=command["num_sequences"] * tokens,
        precision=Precision(command["precision"]),
        num_threads=command["threads"],
        device="cpu",
    )


class Gea:
    """The in-process engine and the event loop that reads from it."""

    def __init__(self, command: dict[str, Any]) -> None:
        self._loop = asyncio.new_event_loop()
        self._numbers = itertools.count()
        self._loaded: Loaded | None = None
        self._settings = settings_for(command)
        self._engine = LocalEngine(Path(command["folder"]), self._settings, load_model=self._load)
        self._loop.run_until_complete(self._engine.start())

    def _load(self, folder: Path, settings: LocalEngineSettings) -> Loaded:
        self._loaded = load(folder, settings)
        return self._loaded

    def facts(self) -> dict[str, Any]:
        """Return versions, sizes, settings and counters."""
        assert self._loaded is not None and self._loaded.memory is not None, "loading comes first"
        memory = self._loaded.memory()
        statistics = self._engine.statistics()
        return {
            "weight_bytes": memory.weights_bytes,
            "kv_bytes": memory.kv_bytes,
            "version": f"gea, {self._engine.identity.engine}",
            "how": f"LocalEngine, {self._engine.identity.precision}, blocks of {self._settings.block_size}, at most "
            f"{self._settings.max_draft} drafted tokens, prefix cache on; the model folder names no end of sequence",
            "num_draft_tokens": statistics.num_draft_tokens,
            "num_accepted_tokens": statistics.num_accepted_tokens,
            "prefix_hit_rate": statistics.prefix_hit_rate,
        }

    def run(self, prompts: list[list[int]], max_tokens: int, turn: Turn) -> Arrivals:
        """Submit all requests and read their streams."""
        return self._loop.run_until_complete(self._run(prompts, max_tokens, turn))

    async def _run(self, prompts: list[list[int]], max_tokens: int, turn: Turn) -> Arrivals:
        sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        requests = [
            EngineRequest(request_id=f"bench-{next(self._numbers)}", prompt=tuple(prompt), sampling=sampling)
            for prompt in prompts
        ]
        arrivals: Arrivals = [[] for _ in prompts]
        counts = [0] * len(prompts)

        async def read(place: int, request: EngineRequest) -> None:
            async for event in self._engine.submit(request):
                if not isinstance(event, TokenChunk) or not event.token_ids:
                    continue
                arrivals[place].append((time.perf_counter(), list(event.token_ids)))
                counts[place] += len(event.token_ids)
                if turn.is_over(min(counts)):
                    for each in requests:
                        self._engine.abort(each.request_id)

        turn.begin()
        async with asyncio.TaskGroup() as tasks:
            for place, request in enumerate(requests):
                tasks.create_task(read(place, request))
        return arrivals


if __name__ == "__main__":
    serve(Gea)
