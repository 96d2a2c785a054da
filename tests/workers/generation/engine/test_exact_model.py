"""The real model draws the tokens of the naive loop, whatever the engine does meanwhile.

The naive loop is checked in one pass: a text is its greedy one if, at every place, the likeliest token of a plain
forward pass over all before it is the next one.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import EngineRequest, Precision, SamplingParams, TokenChunk
from workers.generation.engine.settings import Backend, LocalEngineSettings, Preemption

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
NUM_TOKENS = 20
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=5, max_tokens=NUM_TOKENS, n=2)
TEXTS = (
    "The",
    "In the middle of the night, the captain",
    "请用一句话介绍北京。",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return",
    "🙂🙃 Emoji like 👨‍👩‍👧 are",
    "one two three four five six seven eight. one two three four five six seven eight. one two three",
)
LONG = "The keeper of the lighthouse wrote: all ships came home, and none was lost. " * 18
LENGTHS = (2, 3, 4, 255, 256, 257)
# Far less than all of it needs: they push each other out.
TINY = {"kv_cache_tokens": 288, "block_size": 8, "max_sequences": 16}
ENGINES: dict[str, dict[str, Any]] = {
    "batched": {"max_sequences": 32, "block_size": 32},
    "swapped": {**TINY, "preemption": Preemption.SWAP, "max_batched_tokens": 64},
    "read_again": {**TINY, "max_draft": 0},
    "torch": {"backend": Backend.TORCH, "block_size": 64, "max_sequences": 8, "prefix_cache": False},
}


@pytest.fixture(scope="module")
def folder() -> Path:
    models = pytest.importorskip("ops.embedded")
    try:
        found: Path = models.language_model_folder()
    except models.MissingPrerequisiteError as error:
        pytest.skip(str(error))
    return found


async def opened(folder: Path, **changed: Any) -> LocalEngine:
    chosen: dict[str, Any] = {"max_context": 1_280, "kv_cache_tokens": 8_192, "num_threads": 1, "device": "cpu"}
    chosen |= {"backend": Backend.NATIVE, **changed}
    engine = LocalEngine(folder, LocalEngineSettings(**chosen))
    await engine.start()
    return engine


def prompts_of(engine: LocalEngine, lengths: tuple[int, ...] = LENGTHS) -> list[tuple[int, ...]]:
    long = engine.tokenizer.encode(LONG)
    return [engine.tokenizer.encode(text) for text in TEXTS] + [long[:length] for length in lengths]


async def draw(
    engine: LocalEngine, prompts: list[tuple[int, ...]], sampling: SamplingParams = GREEDY, salt: str = ""
) -> list[list[list[int]]]:
    """Return the tokens of each choice of each prompt, all asked at once."""

    async def one(place: int) -> list[list[int]]:
        request = EngineRequest(request_id=f"r{place}", prompt=prompts[place], sampling=sampling, cache_salt=salt)
        drawn: list[list[int]] = [[] for _ in range(sampling.n)]
        async for event in engine.submit(request):
            if isinstance(event, TokenChunk):
                drawn[event.index] += event.token_ids
        return drawn

    return await asyncio.gather(*(one(place) for place in range(len(prompts))))


@torch.inference_mode()
def assert_naive(model: Any, prompts: list[tuple[int, ...]], answers: list[list[list[int]]]) -> None:
    for prompt, (answer,) in zip(prompts, answers, strict=True):
        assert answer
        logits = model(torch.tensor([[*prompt, *answer[:-1]]])).logits[0, len(prompt) - 1 :]  # (len(answer), vocab)
        assert logits.argmax(-1).tolist() == answer


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


@pytest.mark.parametrize(
    "names", [("batched", "swapped"), pytest.param(("batched", "read_again", "torch"), marks=pytest.mark.soak)]
)
async def test_greedy_text_is_that_of_the_naive_loop_in_every_engine(
    folder: Path, model: Any, names: tuple[str, ...]
) -> None:
    expected: list[list[list[int]]] = []
    for name in names:
        changed = ENGINES[name]
        engine = await opened(folder, **changed)
        prompts = prompts_of(engine)
        answers = await draw(engine, prompts)
        if not expected:
            expected = answers
            assert_naive(model, prompts, answers)
            assert await draw(engine, prompts) == expected  # the prompts are known now
            assert engine.statistics().prefix_hits > 0
            assert await draw(engine, prompts[:4], salt="other tenant") == expected[:4]
            assert engine.statistics().num_accepted_tokens > 0
        assert answers == expected, name
        found = engine.statistics()
        assert bool(found.num_preemptions) == ("kv_cache_tokens" in changed), name
        assert bool(found.swap_ops) == (changed.get("preemption") is Preemption.SWAP), name
        assert found.active_blocks == 0
        await engine.stop()


@pytest.mark.parametrize("precision", [pytest.param(Precision.FP32, marks=pytest.mark.soak), Precision.INT8])
async def test_a_seed_has_one_text_alone_and_in_every_company(folder: Path, precision: Precision) -> None:
    expected: list[list[list[int]]] = []
    for changed in (ENGINES["batched"], ENGINES["swapped"]):
        engine = await opened(folder, precision=precision, **changed)
        prompts = prompts_of(engine, (3, 256))
        answers = await draw(engine, prompts, SEEDED)
        expected = expected or answers
        assert answers == expected
        assert await draw(engine, prompts[:2], SEEDED) == expected[:2]  # in less company, and read before
        assert await draw(engine, prompts[2:3], replace(SEEDED, n=1)) == [expected[2][:1]]
        await engine.stop()
