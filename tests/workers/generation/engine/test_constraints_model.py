"""Forms of answers on the real model: valid in every choice, and cut where they are cut."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from schemas.tokens import FinishReason
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import (
    ConstraintKind,
    ConstraintSpec,
    EngineRequest,
    Finished,
    SamplingParams,
    TokenChunk,
)
from workers.generation.engine.settings import LocalEngineSettings

pytestmark = pytest.mark.model
SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 20},
        "country": {"type": "string", "maxLength": 20},
        "is_capital": {"type": "boolean"},
    },
    "required": ["city", "country", "is_capital"],
    "additionalProperties": False,
}
ASKED = "<|im_start|>user\nDescribe Paris as JSON.<|im_end|>\n<|im_start|>assistant\n"
FORM = ConstraintSpec(kind=ConstraintKind.JSON_SCHEMA, value=json.dumps(SCHEMA))
SAMPLED = SamplingParams(max_tokens=100, temperature=1.0, top_p=0.95, seed=3, n=2, constraint=FORM)
GREEDY = replace(SAMPLED, temperature=0.0, n=1)


@pytest.fixture
async def engine() -> AsyncIterator[LocalEngine]:
    models = pytest.importorskip("ops.embedded")
    try:
        folder = await asyncio.to_thread(models.language_model_folder)
    except models.MissingPrerequisiteError as error:
        pytest.skip(str(error))
    made = LocalEngine(folder, LocalEngineSettings(max_sequences=4, max_context=512, device="cpu"))
    await made.start()
    yield made
    await made.stop()


async def read(engine: LocalEngine, sampling: SamplingParams) -> tuple[dict[int, str], Finished]:
    prompt = engine.tokenizer.encode_control(ASKED)
    request = EngineRequest(request_id="r", prompt=prompt, sampling=sampling)
    *chunks, finished = [event async for event in engine.submit(request)]
    assert isinstance(finished, Finished)
    texts: dict[int, str] = {}
    for chunk in chunks:
        assert isinstance(chunk, TokenChunk)
        texts[chunk.index] = texts.get(chunk.index, "") + chunk.text
    return texts, finished


@pytest.mark.parametrize("sampling", [SAMPLED, GREEDY], ids=["sampled", "greedy"])
async def test_every_choice_of_the_real_model_fits_the_schema(engine: LocalEngine, sampling: SamplingParams) -> None:
    texts, finished = await read(engine, sampling)
    assert len(texts) == sampling.n
    for text in texts.values():
        found = json.loads(text)
        assert list(found) == ["city", "country", "is_capital"]
        assert isinstance(found["is_capital"], bool)
    assert {end.finish_reason for end in finished.choices} == {FinishReason.STOP}


async def test_json_that_is_cut_is_told_by_its_length(engine: LocalEngine) -> None:
    texts, finished = await read(engine, replace(GREEDY, max_tokens=6))
    assert finished.choices[0].finish_reason is FinishReason.LENGTH
    assert texts[0].startswith('{"city": "')


async def test_choice_is_one_of_the_strings(engine: LocalEngine) -> None:
    choices = ("a small village", "a city")
    spec = ConstraintSpec(kind=ConstraintKind.CHOICE, value=json.dumps(choices))
    texts, _ = await read(engine, replace(SAMPLED, constraint=spec))
    assert set(texts.values()) <= set(choices)
