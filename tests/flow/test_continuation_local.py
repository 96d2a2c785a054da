"""An answer of the in-process engine that is cut goes on as it would have, in front of readers too."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import EngineUnavailableError
from schemas.worker import Pool, WorkerState
from tests.flow.continued import Heard, ask, check_once, published, start_path
from tests.flow.harness import DIALOGUE, installation
from tests.workers.generation.fakes import ContextModel, ScriptedModel, scripted, scripted_core
from workers.generation.engine.batch import StepBatch
from workers.generation.engine.loader import Loaded
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.settings import LocalEngineSettings

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 1.0, "seed": 7, "repetition_penalty": 1.3, "presence_penalty": 0.4},
    "two choices": {"temperature": 1.0, "seed": 7, "frequency_penalty": 0.5, "n": 2},
    "stop string": {"temperature": 1.0, "seed": 5, "stop": ("ab", "d.", "h e")},
    "logprobs": {"temperature": 1.0, "seed": 7, "logprobs": 2},
}


class Pausing(ContextModel):
    """Stops before it decodes on when it has made `num_left` such steps, until it is let go."""

    def __init__(self) -> None:
        super().__init__("abcdefgh 你好.")
        self.go = threading.Event()
        self.num_left: int | None = None

    def forward(self, batch: StepBatch) -> torch.Tensor:
        is_decoding = any(segment.num_logits and len(segment.token_ids) == 1 for segment in batch.segments)
        if is_decoding and self.num_left is not None:
            if self.num_left == 0:
                assert self.go.wait(10)
            self.num_left = max(0, self.num_left - 1)
        return super().forward(batch)


def engine_of(model: Pausing, *, step_limit_s: float = 60.0) -> Any:
    """Return an in-process engine around a model whose every token depends on all before it."""

    def load(folder: Path, given: LocalEngineSettings) -> Loaded:
        core = scripted_core(model, num_slots=given.max_sequences, max_context=given.max_context)
        return replace(scripted(ScriptedModel(), max_context=given.max_context), core=core)

    settings = LocalEngineSettings(max_sequences=4, max_context=1_024, step_limit_s=step_limit_s)
    return LocalEngine(Path("nowhere"), settings, load_model=load)


async def undisturbed(fields: dict[str, Any]) -> Heard:
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine_of(Pausing()))
        return await ask(client, **fields)


@pytest.mark.parametrize("num_steps", [0, 1, 9, 20])
@pytest.mark.parametrize("name", SAMPLINGS)
async def test_a_sampled_answer_goes_on_with_the_tokens_it_would_have_drawn(name: str, num_steps: int) -> None:
    fields = {**DIALOGUE, **SAMPLINGS[name], "max_tokens": 60}
    whole = await undisturbed(fields)
    assert len(whole.token_ids[0]) > num_steps + 1
    assert bool(whole.logprobs) == ("logprobs" in fields)
    model = Pausing()
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine_of(model))
        model.num_left = num_steps
        asking = asyncio.create_task(ask(client, **fields))
        await published(gea, min(num_steps + 1, len(whole.token_ids[0])))
        await gea.broker.kill("generation-1")
        model.go.set()
        await gea.kill("generation-1")
        await gea.start(Pool.GENERATION, "generation-2", engine_of(Pausing()))
        heard = await asking
        assert (heard.texts, heard.token_ids, heard.num_resets) == (whole.texts, whole.token_ids, 0)
        assert heard.end is not None
        assert whole.end is not None
        assert (heard.end.usage, heard.end.finish_reason, heard.end.sha256, heard.end.choices) == (
            whole.end.usage,
            whole.end.finish_reason,
            whole.end.sha256,
            whole.end.choices,
        )
        assert [found.token_id for found in heard.logprobs] == [found.token_id for found in whole.logprobs]
        check_once(gea, {index: len(token_ids) for index, token_ids in whole.token_ids.items()})


async def test_an_answer_whose_engine_hangs_is_handed_over() -> None:
    """The step never comes back: the worker gives its engine up, says so, and ends; another one goes on."""
    fields: dict[str, Any] = {**DIALOGUE, "temperature": 1.0, "seed": 7, "max_tokens": 60}
    whole = await undisturbed(fields)
    model = Pausing()
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine_of(model, step_limit_s=0.4))
        model.num_left = 9
        asking = asyncio.create_task(ask(client, **fields))
        await published(gea, 10)
        hanging = gea.workers.pop("generation-1")
        await asyncio.wait((hanging.task,), timeout=10)
        assert isinstance(hanging.task.exception(), EngineUnavailableError)
        assert (status := hanging.worker.status()).state is WorkerState.FAILED
        assert "no step" in status.reason
        await gea.start(Pool.GENERATION, "generation-2", engine_of(Pausing()))
        heard = await asking
        assert (heard.texts, heard.token_ids, heard.num_resets) == (whole.texts, whole.token_ids, 0)
        await hanging.control.close()
        model.go.set()
