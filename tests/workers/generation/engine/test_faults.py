"""Faults that engines of this kind have had, on both of ours; the number above each says where."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
import torch
from msgspec import structs

from schemas.errors import InvalidRequestError
from schemas.tokens import FinishReason, Usage
from tests.workers.generation.engine.asking import local
from tests.workers.generation.fakes import ContextModel, ScriptedModel, context_logits
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.protocol import Engine, EngineRequest, Finished, SamplingParams, TokenChunk

TEXT = "🌶️ 你好 é👨‍👩‍👧"
RAW = TEXT.encode()
GREEDY = SamplingParams(temperature=0, max_tokens=200)
ALPHABET = "abcdefgh ."
PENALTY = 1.6
NUM_CACHED = 24  # of prompts of 30 tokens in blocks of 8


@pytest.fixture(params=["local", "fake"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    made: Engine = FakeEngine(TEXT) if request.param == "fake" else local(ScriptedModel(TEXT, num_prompt=2))
    await made.start()
    yield made
    await made.stop()


def ask(sampling: SamplingParams = GREEDY, output: tuple[tuple[int, ...], ...] = (), name: str = "r") -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tuple(b"Hi"), sampling=sampling, output=output)


async def chunks_of(engine: Engine, request: EngineRequest) -> tuple[list[TokenChunk], Finished]:
    *chunks, finished = [event async for event in engine.submit(request)]
    assert isinstance(finished, Finished)
    return [chunk for chunk in chunks if isinstance(chunk, TokenChunk)], finished


# vllm#48853: a character split over two tokens reached readers as U+FFFD


async def test_character_of_several_tokens_is_published_whole(engine: Engine) -> None:
    chunks, _ = await chunks_of(engine, ask())
    assert "".join(chunk.text for chunk in chunks) == TEXT
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert all(len(chunk.token_ids) == 1 for chunk in chunks)


@pytest.mark.parametrize("max_tokens", range(1, len(RAW), 3))
async def test_answer_that_is_cut_in_a_character_equals_the_full_decode(engine: Engine, max_tokens: int) -> None:
    for given in (0, max_tokens // 2, max_tokens):
        request = ask(replace(GREEDY, max_tokens=max_tokens), (tuple(RAW[:given]),))
        chunks, _ = await chunks_of(engine, request)
        assert "".join(chunk.text for chunk in chunks) == RAW[:max_tokens].decode("utf-8", "replace")
        assert not any("\ufffd" in chunk.text for chunk in chunks[:-1])


# vllm#3574: part of a stop string that spans tokens was published


@pytest.mark.parametrize("stop", ["好 é", "你好 X", "👨‍👩", "️", " 你"])
@pytest.mark.parametrize("given", [0, 9, len(RAW)])
async def test_only_what_may_still_become_a_stop_string_is_held_back(engine: Engine, stop: str, given: int) -> None:
    chunks, finished = await chunks_of(engine, ask(replace(GREEDY, stop=(stop,)), (tuple(RAW[:given]),)))
    published = read = b""
    for chunk in chunks:
        published += chunk.text.encode()
        read += bytes(token_id for token_id in chunk.token_ids if token_id < 256)
        whole = read.decode("utf-8", "ignore")
        held = max(length for length in range(len(stop)) if whole.endswith(stop[:length]))
        if stop not in whole and chunk is not chunks[-1]:
            assert published.decode() == whole[: len(whole) - held]
    assert published.decode() == TEXT.partition(stop)[0]
    assert finished.choices[0].stop_reason == (stop if stop in TEXT else None)


# vllm#28307: repetition_penalty with an empty output or a cached prefix killed the engine


@pytest.mark.parametrize("output", [(), ((),), (tuple(RAW[:7]),), ((), tuple(RAW[:7])), (tuple(RAW), tuple(RAW))])
@pytest.mark.parametrize("repetition_penalty", [0.5, 1.0, 1.2, 2.0])
async def test_repetition_penalty_with_any_output_leaves_the_engine_alive(
    engine: Engine, output: tuple[tuple[int, ...], ...], repetition_penalty: float
) -> None:
    sampling = replace(GREEDY, repetition_penalty=repetition_penalty, n=2)
    chunks, _ = await chunks_of(engine, ask(sampling, output))
    for index in range(2):
        assert "".join(chunk.text for chunk in chunks if chunk.index == index) == TEXT


def penalised(prompt: tuple[int, ...], read: slice, num_tokens: int) -> list[int]:
    """Draw greedily in a naive loop, with a penalty on the output and on a part of the prompt."""
    logits_of, drawn = context_logits(ALPHABET), list[int]()
    while len(drawn) < num_tokens and END_OF_SEQUENCE not in drawn:
        logits = logits_of([*prompt, *drawn])  # (vocab,)
        seen = torch.tensor(sorted({*prompt[read], *drawn}), dtype=torch.int64)
        logits[seen] = torch.where(logits[seen] > 0, logits[seen] / PENALTY, logits[seen] * PENALTY)
        drawn.append(int(logits.argmax()))
    return drawn


@pytest.mark.parametrize("text", ["abcabcab abcabc.abcabcab defgh", "add. add. add. add. add. beach"])
async def test_repetition_penalty_over_a_cached_prefix_is_that_over_one_that_was_read(text: str) -> None:
    prompt, sampling = tuple(text.encode()), replace(GREEDY, repetition_penalty=PENALTY, max_tokens=12)
    request = EngineRequest(request_id="r", prompt=prompt, sampling=sampling)
    made = local(ContextModel(ALPHABET, block_size=8))
    await made.start()
    fresh, cached = [await chunks_of(made, request) for _ in range(2)]
    await made.stop()
    assert (fresh[1].usage.cached_tokens, cached[1].usage.cached_tokens) == (0, NUM_CACHED)
    expected = penalised(prompt, slice(None), 12)
    for chunks, _ in (fresh, cached):
        assert [token_id for chunk in chunks for token_id in chunk.token_ids] == expected
    for part in (slice(0), slice(NUM_CACHED), slice(NUM_CACHED, None)):
        assert penalised(prompt, part, 12) != expected, f"{part} would do: this prompt tells nothing"


@pytest.mark.parametrize("repetition_penalty", [0.0, -1.0, -math.inf, math.inf, math.nan])
async def test_repetition_penalty_that_is_no_factor_is_refused(engine: Engine, repetition_penalty: float) -> None:
    for output in ((), (tuple(RAW[:3]),)):
        with pytest.raises(InvalidRequestError, match="repetition_penalty"):
            engine.submit(ask(replace(GREEDY, repetition_penalty=repetition_penalty), output))
    assert "".join(chunk.text for chunk in (await chunks_of(engine, ask()))[0]) == TEXT


# litellm#37992: usage was lost or counted twice on cancel or crash


@pytest.mark.parametrize("given", [0, 5, len(RAW)])
@pytest.mark.parametrize("abort_at", [0, 1, 4, 30])
async def test_usage_is_the_tokens_of_the_stream_wherever_it_is_cut(engine: Engine, given: int, abort_at: int) -> None:
    request = ask(replace(GREEDY, n=2), (tuple(RAW[:given]), tuple(RAW[: given // 2])))
    stream = engine.submit(request)
    if not abort_at:
        engine.abort("r")
    num_tokens, finished = [0, 0], None
    async for event in stream:
        if isinstance(event, Finished):
            finished = event
            continue
        num_tokens[event.index] += len(event.token_ids)
        if sum(num_tokens) == abort_at:
            engine.abort("r")
    assert finished is not None
    assert finished.usage.prompt_tokens == 2
    assert finished.usage.completion_tokens == sum(num_tokens)
    assert [end.num_tokens for end in finished.choices] == num_tokens
    assert {end.finish_reason for end in finished.choices} <= {FinishReason.ABORT, FinishReason.STOP}


@pytest.mark.parametrize("published", range(0, len(RAW) + 2, 4))
async def test_usage_after_a_crash_is_that_of_the_undisturbed_run(engine: Engine, published: int) -> None:
    chunks, whole = await chunks_of(engine, ask())
    before = tuple(token_id for chunk in chunks for token_id in chunk.token_ids)[:published]
    _, continued = await chunks_of(engine, ask(output=(before,)))
    assert continued.choices == whole.choices
    assert without_cached(continued.usage) == without_cached(whole.usage)


def without_cached(usage: Usage) -> Usage:
    """What came out of the prefix cache depends on who has been here before."""
    return structs.replace(usage, cached_tokens=0)
