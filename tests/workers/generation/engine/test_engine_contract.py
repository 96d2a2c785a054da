"""What every engine keeps, the one in the process and the scripted one alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from schemas.errors import EngineUnavailableError, InvalidRequestError, PromptTooLongError, RejectedError
from schemas.tokens import FinishReason
from tests.workers.generation.engine.asking import GREEDY, ask, assert_at_rest, local, read
from tests.workers.generation.fakes import ScriptedModel
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE
from workers.generation.engine.fake import FakeEngine
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import Engine, SamplingParams, TokenChunk


@pytest.fixture(params=["local", "fake"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """Both engines keep the same contract."""
    async with started(request.param, ScriptedModel("Hello 你好.")) as made:
        yield made


@pytest.fixture(params=["local", "fake"])
async def continuing(request: pytest.FixtureRequest) -> AsyncIterator[Engine]:
    """Both engines, for prompts of two tokens."""
    async with started(request.param, ScriptedModel("Hello 你好.", num_prompt=2)) as made:
        yield made


@asynccontextmanager
async def started(kind: str, model: ScriptedModel) -> AsyncIterator[Engine]:
    fake = FakeEngine("Hello 你好.", max_sequences=4, max_context=512, max_waiting=4)
    made: Engine = fake if kind == "fake" else local(model, max_waiting=4)
    await made.start()
    yield made
    await made.stop()


async def test_stream_carries_the_text_and_one_end(engine: Engine) -> None:
    text, finished = await read(engine.submit(ask()))
    assert text == "Hello 你好."
    assert finished.usage.completion_tokens == len("Hello 你好.".encode()) + 1


async def test_requests_run_together_and_their_ids_may_be_used_again(engine: Engine) -> None:
    results = await asyncio.gather(*(read(engine.submit(ask(f"r{place}"))) for place in range(6)))
    assert {text for text, _ in results} == {"Hello 你好."}
    assert (await read(engine.submit(ask("r0"))))[0] == "Hello 你好."


async def test_unusable_requests_are_refused_and_others_go_on(engine: Engine) -> None:
    stream = engine.submit(ask("good"))
    with pytest.raises(PromptTooLongError):
        engine.submit(ask("long", prompt="x" * 512))
    for sampling in (SamplingParams(n=5), SamplingParams(max_tokens=0), SamplingParams(temperature=float("nan"))):
        with pytest.raises(InvalidRequestError):
            engine.submit(ask("bad", sampling=sampling))
    with pytest.raises(InvalidRequestError):
        engine.submit(ask("empty", prompt=""))
    with pytest.raises(InvalidRequestError, match="already in flight"):
        engine.submit(ask("good"))
    assert (await read(stream))[0] == "Hello 你好."


@pytest.mark.parametrize("token_id", [5.0, True, "5", None])
@pytest.mark.parametrize("field", ["prompt", "output", "stop_token_ids", "logit_bias"])
async def test_what_is_no_token_id_is_refused_by_its_field(engine: Engine, field: str, token_id: Any) -> None:
    given = ask("bad")
    if field == "prompt":
        given = replace(given, prompt=(1, token_id, 2))
    elif field == "output":
        given = replace(given, output=((token_id,),))
    else:
        ids: Any = {token_id: 1.0} if field == "logit_bias" else frozenset({token_id})
        changes: dict[str, Any] = {field: ids}
        given = replace(given, sampling=replace(GREEDY, **changes))
    with pytest.raises(InvalidRequestError, match="no token id") as caught:
        engine.submit(given)
    assert caught.value.field == field


async def test_full_queue_refuses_for_now(engine: Engine) -> None:
    streams = [engine.submit(ask(f"r{place}")) for place in range(8)]
    with pytest.raises(RejectedError):
        engine.submit(ask("one more"))
    await asyncio.gather(*map(read, streams))


async def test_longest_prompt_that_fits_gets_its_one_token(engine: Engine) -> None:
    text, finished = await read(engine.submit(ask(prompt="x" * 511)))
    assert text == "H"
    assert finished.choices[0].finish_reason is FinishReason.LENGTH


HELLO = (*"Hello 你好.".encode(), END_OF_SEQUENCE)


@pytest.mark.parametrize("stop", [(), ("lo", "好"), ("你",), ("o 你好.",)])
async def test_an_answer_cut_anywhere_goes_on_as_it_would_have(continuing: Engine, stop: tuple[str, ...]) -> None:
    sampling = replace(GREEDY, stop=stop)
    whole, finished = await read(continuing.submit(ask(sampling=sampling)))
    for cut in range(len(HELLO) + 1):
        request = replace(ask(sampling=sampling), output=(HELLO[:cut],))
        text, again = await read(continuing.submit(request))
        assert (text, again.choices, again.usage) == (whole, finished.choices, finished.usage)


async def test_choices_go_on_from_their_own_cuts(continuing: Engine) -> None:
    request = ask(sampling=replace(GREEDY, n=4, max_tokens=9))
    _, whole = await read(continuing.submit(request))
    for output in ((HELLO[:9], HELLO[:1], (), HELLO[:3]), ((), HELLO), (), (HELLO,) * 4):
        stream = continuing.submit(replace(request, output=output))
        texts, chunks = [""] * 4, []
        async for event in stream:
            if isinstance(event, TokenChunk):
                texts[event.index] += event.text
                chunks.append(event)
            else:
                assert (event.choices, event.usage) == (whole.choices, whole.usage)
        assert texts == ["Hello 你"] * 4
        given = sum(len(token_ids[:9]) for token_ids in output)
        assert all(chunk.logprobs is None for chunk in chunks[:given])


async def test_unusable_output_is_refused_and_others_go_on(continuing: Engine) -> None:
    stream = continuing.submit(ask("good"))
    for output in (((1, 512),), ((-1,),), ((), (1, 2, 3)), ((2**63,),)):
        with pytest.raises(InvalidRequestError, match="output"):
            continuing.submit(replace(ask("bad"), output=output))
    for output in ((HELLO * 100,), ((),)):
        await read(continuing.submit(replace(ask("odd"), output=output)))
    assert (await read(stream))[0] == "Hello 你好."


async def test_request_that_is_over_when_it_comes_leaves_nothing_behind(continuing: Engine) -> None:
    for _ in range(20):
        _, finished = await read(continuing.submit(replace(ask("again"), output=(HELLO,))))
        assert finished.choices[0].finish_reason is FinishReason.STOP
    continuing.abort("again")
    assert (await read(continuing.submit(ask("again"))))[0] == "Hello 你好."
    if isinstance(continuing, LocalEngine):
        assert_at_rest(continuing)


async def test_abort_ends_the_stream_and_frees_the_id_at_once(engine: Engine) -> None:
    stream = engine.submit(ask("again"))
    engine.abort("again")
    engine.abort("unknown")
    second = engine.submit(ask("again"))
    _, finished = await read(stream)
    assert finished.choices[0].finish_reason in (FinishReason.ABORT, FinishReason.STOP)
    assert (await read(second))[0] == "Hello 你好."


async def test_stop_ends_open_streams_and_refuses_new_ones(engine: Engine) -> None:
    streams = [engine.submit(ask(f"r{place}")) for place in range(8)]
    await engine.stop()
    await engine.stop()
    ends = await asyncio.gather(*map(read, streams), return_exceptions=True)
    assert all(isinstance(end, tuple | EngineUnavailableError) for end in ends)
    assert any(isinstance(end, EngineUnavailableError) for end in ends)
    with pytest.raises(EngineUnavailableError):
        engine.submit(ask("late"))


@pytest.mark.parametrize(("num_tokens", "is_allowed"), [(510, True), (511, True), (512, False), (513, False)])
async def test_prompt_at_the_limit_of_the_context(engine: Engine, num_tokens: int, is_allowed: bool) -> None:
    if not is_allowed:
        with pytest.raises(PromptTooLongError):
            engine.submit(ask(prompt="x" * num_tokens))
        return
    _, finished = await read(engine.submit(ask(prompt="x" * num_tokens)))
    assert finished.choices[0].finish_reason is FinishReason.LENGTH
    assert finished.usage.completion_tokens == 512 - num_tokens
