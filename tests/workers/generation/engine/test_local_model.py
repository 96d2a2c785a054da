"""The whole in-process engine with real forward passes of a tiny random model, on every backend of the CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from schemas.tokens import FinishReason
from tests.workers.generation.engine.asking import assert_at_rest, read
from tests.workers.generation.engine.tiny_models import save_model
from tests.workers.generation.fakes import save_tokenizer
from workers.generation.engine.loader import load
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import EngineRequest, Precision, SamplingParams, TokenChunk
from workers.generation.engine.settings import Backend, LocalEngineSettings

BACKENDS = [Backend.NATIVE, Backend.TORCH, Backend.TRANSFORMERS]
GREEDY = SamplingParams(temperature=0, max_tokens=24)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("model")
    save_model(made, "mistral", eos_token_id=319, head_dim=16)
    save_tokenizer(made)
    return made


def settings(**changed: Any) -> LocalEngineSettings:
    chosen: dict[str, Any] = {"max_sequences": 32, "max_context": 128, "device": "cpu", "num_threads": 1, **changed}
    return LocalEngineSettings(**chosen)


@pytest.fixture(params=BACKENDS)
async def engine(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[LocalEngine]:
    made = LocalEngine(folder, settings(backend=request.param))
    await made.start()
    yield made
    await made.stop()


def ask(name: str, prompt: tuple[int, ...] = (5, 6, 7), **sampling: Any) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=prompt, sampling=replace(GREEDY, **sampling))


async def token_ids(engine: LocalEngine, request: EngineRequest) -> list[list[int]]:
    drawn: list[list[int]] = [[] for _ in range(request.sampling.n)]
    async for event in engine.submit(request):
        if isinstance(event, TokenChunk):
            drawn[event.index] += event.token_ids
    return drawn


async def test_answers_are_the_same_alone_and_among_others(engine: LocalEngine) -> None:
    prompts = [tuple(range(3, 4 + 3 * place)) for place in range(12)]
    alone = [await token_ids(engine, ask(f"a{place}", prompt)) for place, prompt in enumerate(prompts)]
    together = await asyncio.gather(
        *(token_ids(engine, ask(f"b{place}", prompt)) for place, prompt in enumerate(prompts))
    )
    assert together == alone
    assert engine.statistics().prefix_hits > 0  # the second time the prompts were known


async def test_choices_share_a_prompt_and_draw_their_own(engine: LocalEngine) -> None:
    request = ask("n", tuple(range(3, 60)), n=4, temperature=1.0, seed=3)
    drawn = await token_ids(engine, request)
    assert len({tuple(choice) for choice in drawn}) == 4
    assert await token_ids(engine, request) == drawn


async def test_event_loop_ticks_while_a_full_batch_decodes(engine: LocalEngine) -> None:
    gaps: list[float] = []

    async def heartbeat() -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(0.001)
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    beating = asyncio.create_task(heartbeat())
    answers = await asyncio.gather(*(token_ids(engine, ask(f"r{place}", (place + 3,))) for place in range(32)))
    beating.cancel()
    assert all(1 <= len(drawn[0]) <= 24 for drawn in answers)
    assert engine.statistics().num_steps < 32 * 24 / 4  # they ran together
    assert len(gaps) > 10
    assert sorted(gaps)[len(gaps) // 2] < 0.05


async def test_urgent_requests_go_first(folder: Path) -> None:
    engine = LocalEngine(folder, settings(max_sequences=1, backend=BACKENDS[0]))
    await engine.start()
    order: list[str] = []

    async def answer(name: str, priority: int) -> None:
        await read(engine.submit(replace(ask(name), priority=priority)))
        order.append(name)

    first = engine.submit(ask("first"))
    await anext(first)  # it runs; the others wait
    waiting = [asyncio.create_task(answer(name, rank)) for name, rank in (("low", 1), ("normal", 0), ("high", -1))]
    await read(first)
    await asyncio.gather(*waiting)
    await engine.stop()
    assert order == ["high", "normal", "low"]


async def test_a_thousand_cancels_leave_no_block_behind_and_no_step_more(engine: LocalEngine) -> None:
    async def num_steps() -> int:
        before = engine.statistics().num_steps
        await asyncio.gather(*(token_ids(engine, ask(f"s{place}", (place + 3, 9))) for place in range(8)))
        return engine.statistics().num_steps - before

    await num_steps()  # now its prompts are known
    before = await num_steps()
    for count in range(1_000):
        stream = engine.submit(ask(f"r{count}", (count % 300 + 3, 5), max_tokens=100))
        if count % 50 == 0:
            await anext(stream)
        engine.abort(f"r{count}")
        _, finished = await read(stream)
        assert finished.choices[0].finish_reason in (FinishReason.ABORT, FinishReason.STOP)
    assert await num_steps() <= before + 2  # as fast as before; how they meet the first step is up to the threads
    found = engine.statistics()
    assert (found.active_blocks, found.running, found.tokens_in_flight) == (0, 0, 0)
    assert_at_rest(engine)


async def test_memory_that_runs_out_costs_no_more_than_one_request(folder: Path) -> None:
    """Steps of more than a few rows fail; later ones are smaller, and everybody else is answered."""

    def short_of_memory(folder: Path, given: LocalEngineSettings) -> Any:
        loaded = load(folder, given)
        runner = loaded.core._runner
        forward = runner.forward

        def limited(batch: Any) -> torch.Tensor:
            if batch.num_tokens > 12:
                raise torch.OutOfMemoryError("out of memory")
            return forward(batch)

        runner.forward = limited  # type: ignore[method-assign]
        return loaded

    chosen = settings(backend=BACKENDS[0])
    whole = LocalEngine(folder, chosen)
    await whole.start()
    expected = [await token_ids(whole, ask(f"r{place}", (place + 3,))) for place in range(20)]
    await whole.stop()
    engine = LocalEngine(folder, chosen, load_model=short_of_memory)
    await engine.start()
    answers = await asyncio.gather(
        *(token_ids(engine, ask(f"r{place}", (place + 3,))) for place in range(20)), return_exceptions=True
    )
    await engine.stop()
    assert sum(answer == wanted for answer, wanted in zip(answers, expected, strict=True)) >= 19


async def test_identity_names_what_shapes_the_text(folder: Path) -> None:
    for backend in BACKENDS:
        loaded = load(folder, settings(backend=backend))
        assert (loaded.identity.engine, loaded.identity.precision) == (f"{backend}-cpu", "fp32/kv-fp32")
        assert loaded.memory is not None and loaded.layout is not None
        memory = loaded.memory()
        assert min(memory.weights_bytes, memory.activation_bytes) > 0
        assert memory.kv_bytes == loaded.layout.num_blocks * loaded.layout.bytes_per_block
        assert loaded.layout.num_blocks == 32 * 128 // 16  # every sequence at its longest
        loaded.close()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"device": "cuda:7"}, "generation.local.device"),
        ({"precision": Precision.FP8}, "generation.precision"),
        ({"backend": Backend.NATIVE, "device": "meta"}, "generation.local"),
    ],
)
def test_what_cannot_run_here_is_refused_by_name(folder: Path, changed: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named.replace(".", r"\.")):
        load(folder, settings(**changed))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_cache_that_no_memory_holds_is_named(folder: Path, backend: Backend) -> None:
    with pytest.raises(ConfigError, match=r"local\.kv_cache_tokens: no memory for [0-9]+ MB of cache"):
        load(folder, settings(backend=backend, kv_cache_tokens=10**13))
