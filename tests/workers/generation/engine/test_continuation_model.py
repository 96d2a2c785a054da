"""An answer of a real forward pass that is cut anywhere and continued is the undisturbed one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from schemas.tokens import FinishReason
from tests.workers.generation.engine.test_continuation import Outcome, outcome
from tests.workers.generation.engine.test_model import save_tiny_model
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import EngineRequest, SamplingParams
from workers.generation.engine.settings import LocalEngineSettings

PROMPT = tuple(range(20, 60))
GREEDY = SamplingParams(temperature=0, max_tokens=24)
WARM = SamplingParams(temperature=1.0, seed=11, max_tokens=24)
SAMPLINGS = {
    "greedy": GREEDY,
    "greedy_repetition": replace(GREEDY, repetition_penalty=1.3),
    "warm": replace(WARM, top_p=0.95, top_k=100, min_p=0.01),
    "penalties": replace(WARM, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.5),
    "biased": replace(WARM, logit_bias={100: 6.0, 2: -100.0}),
}


async def read(engine: LocalEngine, request: EngineRequest) -> Outcome:
    events = [event async for event in engine.submit(request)]
    return outcome(events, request.sampling.n)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small products are slower on many threads, and far slower where the cores are shared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
async def tiny(tmp_path: Path) -> AsyncIterator[LocalEngine]:
    save_tiny_model(tmp_path)
    settings = LocalEngineSettings(max_sequences=4, max_context=128, max_batched_tokens=16, device="cpu")
    engine = LocalEngine(tmp_path, settings)
    await engine.start()
    yield engine
    await engine.stop()


@pytest.mark.parametrize("name", SAMPLINGS)
async def test_tiny_model_goes_on_from_every_cut(tiny: LocalEngine, name: str) -> None:
    request = EngineRequest(request_id="r", prompt=PROMPT, sampling=SAMPLINGS[name])
    whole = await read(tiny, request)
    assert len(whole.token_ids[0]) > 4
    for cut in range(len(whole.token_ids[0]) + 1):
        assert await read(tiny, replace(request, output=(whole.token_ids[0][:cut],))) == whole


async def test_tiny_model_stops_where_it_would_have(tiny: LocalEngine) -> None:
    request = EngineRequest(request_id="r", prompt=PROMPT, sampling=replace(WARM, logit_bias={2: -100.0}))
    ids = (await read(tiny, request)).token_ids[0]
    stop = tiny.tokenizer.decode(ids[9:12])[1:]
    for sampling in (
        replace(request.sampling, stop=(stop,)),
        replace(request.sampling, stop_token_ids=frozenset(ids[9:10])),
    ):
        whole = await read(tiny, replace(request, sampling=sampling))
        assert whole.ends[0].finish_reason is FinishReason.STOP and whole.ends[0].stop_reason is not None
        for cut in range(len(whole.token_ids[0]) + 1):
            assert await read(tiny, replace(request, sampling=sampling, output=(ids[:cut],))) == whole


async def test_tiny_model_continues_choices_among_neighbours(tiny: LocalEngine) -> None:
    requests = [
        EngineRequest(request_id=f"{place}", prompt=PROMPT[place:], sampling=replace(sampling, n=1 + place % 3))
        for place, sampling in enumerate(SAMPLINGS.values())
    ]
    alone = [await read(tiny, request) for request in requests]
    continued = [
        replace(
            request,
            request_id=f"again-{request.request_id}",
            output=tuple(ids[: (place * 5 + index * 9) % 25] for index, ids in enumerate(whole.token_ids)),
        )
        for place, (request, whole) in enumerate(zip(requests, alone, strict=True))
    ]
    together = await asyncio.gather(*(read(tiny, request) for request in (*continued, *requests)))
    assert together == alone + alone


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_real_weights_go_on_from_their_cuts() -> None:
    models = pytest.importorskip("ops.embedded")
    try:
        folder = await asyncio.to_thread(models.language_model_folder)
    except models.MissingPrerequisiteError as error:
        pytest.skip(str(error))
    engine = LocalEngine(folder, LocalEngineSettings(max_sequences=4, max_context=512, device="cpu"))
    await engine.start()
    texts = [
        "<|im_start|>user\nTell me a story about a fox.<|im_end|>\n<|im_start|>assistant\n",
        "用中文写一句话：你好 🌶️",
    ]
    samplings = (
        SamplingParams(temperature=0, max_tokens=32, repetition_penalty=1.2),
        SamplingParams(temperature=0.8, top_p=0.9, seed=5, max_tokens=32, n=2, frequency_penalty=0.3),
    )
    for text in texts:
        for sampling in samplings:
            request = EngineRequest(request_id="r", prompt=engine.tokenizer.encode_control(text), sampling=sampling)
            whole = await read(engine, request)
            for cut in (7, 30):
                output = tuple(ids[: max(0, cut - 6 * index)] for index, ids in enumerate(whole.token_ids))
                assert await read(engine, replace(request, output=output)) == whole
    await engine.stop()
