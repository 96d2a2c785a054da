"""Answers that must have a form, over the whole path: whole, cut, taken over, refused."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from schemas.response_format import ChoiceFormat, JsonSchema, JsonSchemaFormat, RegexFormat, ResponseFormat
from schemas.tokens import EndStatus, FinishReason
from schemas.worker import Pool
from tests.flow.continued import Heard, ask, check_once, published, start_path
from tests.flow.harness import DIALOGUE, installation
from tests.flow.test_continuation_local import Pausing
from tests.workers.generation.fakes import ScriptedModel, context_logits, scripted, scripted_core
from workers.generation.engine.byte_tokenizer import VOCABULARY_SIZE, ByteTokenizer
from workers.generation.engine.constraints import ConstraintCompiler
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.loader import Loaded
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.settings import LocalEngineSettings

SCHEMA = {
    "type": "object",
    "properties": {
        "hue": {"enum": ["red", "green"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 3}, "minItems": 1, "maxItems": 2},
    },
    "required": ["hue", "tags"],
    "additionalProperties": False,
}
JSON_FORM = JsonSchemaFormat(json_schema=JsonSchema(schema=SCHEMA))
SEEDED: dict[str, Any] = {**DIALOGUE, "temperature": 1.0, "seed": 7, "max_tokens": 200}
COMPILER = ConstraintCompiler(ByteTokenizer(), vocab_size=VOCABULARY_SIZE)


def engine_of(model: Pausing) -> Any:
    """Return an in-process engine whose model would write anything but JSON by itself; it guesses tokens ahead."""
    model._answer = context_logits('{}[]":, abcdeghlnru0123456789\n')

    def load(folder: Path, given: LocalEngineSettings) -> Loaded:
        core = scripted_core(model, num_slots=given.max_sequences, max_context=given.max_context, max_draft=4)
        loaded = scripted(ScriptedModel(), max_context=given.max_context)
        return replace(loaded, core=core, compile_constraint=COMPILER.compile)

    return LocalEngine(Path("nowhere"), LocalEngineSettings(max_sequences=4, max_context=1_024), load_model=load)


async def answered(form: ResponseFormat, **fields: Any) -> Heard:
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine_of(Pausing()))
        return await ask(client, response_format=form, **{**SEEDED, **fields})


def check_json(text: str) -> None:
    found = json.loads(text)
    assert set(found) == {"hue", "tags"}
    assert found["hue"] in ("red", "green")
    assert 1 <= len(found["tags"]) <= 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_every_choice_fits_the_schema_and_is_complete(temperature: float) -> None:
    heard = await answered(JSON_FORM, n=2, temperature=temperature)
    for text in heard.texts.values():
        check_json(text)
    assert len(heard.texts) == 2
    assert heard.end is not None
    assert (heard.end.status, heard.end.finish_reason) == (EndStatus.COMPLETED, FinishReason.STOP)


async def test_pattern_and_choice_hold_too() -> None:
    assert (await answered(ChoiceFormat(choices=("maybe not", "never")))).texts[0] in ("maybe not", "never")
    text = (await answered(RegexFormat(pattern="[a-c]{5}-[0-9]{3}"))).texts[0]
    assert (len(text), text[5]) == (9, "-")


@pytest.mark.parametrize("max_tokens", [1, 12])
async def test_json_that_is_cut_is_incomplete(max_tokens: int) -> None:
    heard = await answered(JSON_FORM, max_tokens=max_tokens)
    whole = await answered(JSON_FORM)
    assert heard.end is not None
    assert (heard.end.status, heard.end.finish_reason) == (EndStatus.INCOMPLETE, FinishReason.LENGTH)
    assert heard.texts[0] == whole.texts[0][:max_tokens]
    with pytest.raises(ValueError, match=r"(?i)expect|unterminated|control"):
        json.loads(heard.texts[0])


async def test_white_space_never_fills_an_answer() -> None:
    text = (await answered(JSON_FORM)).texts[0]
    assert "\n" not in text
    assert "  " not in text


@pytest.mark.parametrize("num_steps", [0, 3, 17])
async def test_json_that_is_taken_over_goes_on_where_it_was(num_steps: int) -> None:
    whole = await answered(JSON_FORM)
    num_tokens = len(whole.token_ids[0])
    model = Pausing()
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine_of(model))
        model.num_left = min(num_steps, num_tokens - 2)
        asking = asyncio.create_task(ask(client, response_format=JSON_FORM, **SEEDED))
        await published(gea, model.num_left + 1)
        await gea.broker.kill("generation-1")
        model.go.set()
        await gea.kill("generation-1")
        await gea.start(Pool.GENERATION, "generation-2", engine_of(Pausing()))
        heard = await asking
        assert (heard.texts, heard.token_ids, heard.num_resets) == (whole.texts, whole.token_ids, 0)
        assert heard.end is not None and whole.end is not None
        assert (heard.end.status, heard.end.usage) == (whole.end.status, whole.end.usage)
        check_once(gea, {0: num_tokens})
    check_json(heard.texts[0])


@pytest.mark.parametrize(
    ("form", "match"),
    [
        (JsonSchemaFormat(json_schema=JsonSchema(schema={"type": "strange"})), "strange"),
        (RegexFormat(pattern="(a"), "unclosed"),
        (RegexFormat(pattern="[a&&b]"), "no text"),
    ],
)
async def test_form_that_only_the_worker_can_refuse_ends_its_request_at_once(form: ResponseFormat, match: str) -> None:
    heard = await answered(form)
    assert heard.end is not None and heard.end.failure is not None
    assert (heard.end.status, heard.end.failure.code) == (EndStatus.FAILED, "invalid_request")
    assert match in heard.end.failure.message
    assert heard.texts.get(0, "") == ""


async def test_a_form_reaches_an_engine_that_follows_a_script() -> None:
    engine = FakeEngine("Hello.")
    async with installation() as gea, gea.client() as client:
        await start_path(gea, engine)
        heard = await ask(client, response_format=JSON_FORM, **DIALOGUE)
    assert heard.texts[0] == "Hello."
    assert [request.sampling.constraint is not None for request in engine.requests] == [True]


async def test_passages_are_read_and_the_answer_is_the_models_alone() -> None:
    engine = FakeEngine('{"days": 30}')
    async with installation() as gea, gea.client() as client:
        await gea.start_all(engine)
        heard = await ask(client, "How long can I return shoes?", response_format=JSON_FORM)
    assert heard.texts[0] == '{"days": 30}'
    assert heard.end is not None
    assert heard.end.strategy == "knowledge"
    assert b"within 30 days" in bytes(token for token in engine.requests[0].prompt if token < 256)
