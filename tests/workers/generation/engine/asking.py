"""Engines over a scripted model, and readers of their streams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.workers.generation.fakes import PagedModel, scripted
from workers.generation.engine.loader import Loaded
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import EngineRequest, EngineStream, Finished, SamplingParams, TokenChunk
from workers.generation.engine.settings import LocalEngineSettings

GREEDY = SamplingParams(temperature=0, max_tokens=400)
NOWHERE = Path("nowhere")


def local(model: PagedModel, **settings: Any) -> LocalEngine:
    """Return an in-process engine around a model, not yet started."""
    chosen = LocalEngineSettings(**{"max_sequences": 4, "max_context": 512, **settings})

    def load(folder: Path, given: LocalEngineSettings) -> Loaded:
        return scripted(model, num_slots=given.max_sequences, max_context=given.max_context)

    return LocalEngine(NOWHERE, chosen, load_model=load)


def ask(name: str = "r", prompt: str = "Hi", sampling: SamplingParams = GREEDY) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tuple(prompt.encode()), sampling=sampling)


def assert_at_rest(engine: LocalEngine) -> None:
    """Nothing of a request is left behind."""
    assert not engine._streams and not engine._tickets and not engine._uncompiled and not engine._thread._active


async def read(stream: EngineStream) -> tuple[str, Finished]:
    text, finished = "", None
    async for event in stream:
        if isinstance(event, TokenChunk):
            text += event.text
        else:
            finished = event
    assert finished is not None
    return text, finished
