"""The whole engine over two ranks: the answers of one, and an end for every request when a rank is gone."""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path

import pytest

from schemas.errors import ConfigError, EngineUnavailableError
from tests.workers.generation.engine.test_model import save_tiny_model
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import EngineRequest, SamplingParams, TokenChunk
from workers.generation.engine.settings import Backend, LocalEngineSettings

pytestmark = pytest.mark.slow  # each rank is a process that imports torch
END_S = 20.0
PROMPTS = ((5,), (7, 8, 9, 10), tuple(range(20, 57)))


def engine(folder: Path, size: int, backend: Backend = Backend.TORCH) -> LocalEngine:
    return LocalEngine(
        folder,
        LocalEngineSettings(
            max_sequences=4, max_context=128, device="cpu", num_threads=size, tensor_parallel=size, backend=backend
        ),
    )


async def answer(asked: LocalEngine, number: int, *, max_tokens: int) -> tuple[int, ...]:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
    stream = asked.submit(EngineRequest(request_id=str(number), prompt=PROMPTS[number], sampling=sampling))
    return tuple([token async for chunk in stream if isinstance(chunk, TokenChunk) for token in chunk.token_ids])


async def answers(asked: LocalEngine) -> list[tuple[int, ...]]:
    return await asyncio.gather(*(answer(asked, number, max_tokens=24) for number in range(len(PROMPTS))))


async def test_an_engine_over_two_ranks_answers_like_one(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    found, identities = [], set()
    for size in (1, 2):
        asked = engine(tmp_path, size, Backend.AUTO if size > 1 else Backend.TORCH)
        await asked.start()
        found.append(await answers(asked))
        identities.add(asked.identity)
        await asked.stop()
    assert found[0] == found[1]
    assert len(identities) == 2, "other sums, other digits: one cannot go on with the other's text"
    assert not multiprocessing.active_children()


async def test_requests_end_when_a_rank_is_gone(tmp_path: Path) -> None:
    save_tiny_model(tmp_path)
    asked = engine(tmp_path, 2)
    await asked.start()
    running = asyncio.create_task(answer(asked, 1, max_tokens=100))
    (rank,) = multiprocessing.active_children()
    rank.kill()
    with pytest.raises(EngineUnavailableError):
        await asyncio.wait_for(running, END_S)
    assert "rank 1 of 2" in asked.statistics().failure
    with pytest.raises(EngineUnavailableError):
        asked.submit(EngineRequest(request_id="later", prompt=(5,)))
    await asyncio.wait_for(asked.stop(), END_S)


async def test_a_model_that_cannot_be_split_is_refused_at_the_start(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, num_kv_heads=1)
    asked = engine(tmp_path, 2)
    with pytest.raises(ConfigError, match="2 does not divide this model's num_kv_heads 1"):
        await asked.start()
