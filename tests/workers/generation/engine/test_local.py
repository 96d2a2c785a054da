from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.errors import (
    ConfigError,
    EngineUnavailableError,
    InvalidRequestError,
    PromptTooLongError,
    RejectedError,
)
from schemas.tokens import FinishReason
from tests.workers.generation.fakes import ScriptedModel, scripted
from workers.generation.engine.fake import END_OF_SEQUENCE, FakeEngine
from workers.generation.engine.loader import Loaded
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import (
    Engine,
    EngineRequest,
    EngineStream,
    Finished,
    SamplingParams,
    TokenChunk,
)
from workers.generation.engine.sequence import ActiveRequest
from workers.generation.engine.settings import LocalEngineSettings

GREEDY = SamplingParams(temperature=0, max_tokens=400)
NOWHERE = Path("nowhere")


def local(model: ScriptedModel, **settings: int) -> LocalEngine:
    chosen = LocalEngineSettings(**{"max_sequences": 4, "max_context": 512, **settings})  # type: ignore[arg-type]

    def load(folder: Path, given: LocalEngineSettings) -> Loaded:
        return scripted(model, num_slots=given.max_sequences, max_context=given.max_context)

    return LocalEngine(NOWHERE, chosen, load_model=load)


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


def ask(name: str = "r", prompt: str = "Hi", sampling: SamplingParams = GREEDY) -> EngineRequest:
    return EngineRequest(request_id=name, prompt=tuple(prompt.encode()), sampling=sampling)


async def read(stream: EngineStream) -> tuple[str, Finished]:
    text, finished = "", None
    async for event in stream:
        if isinstance(event, TokenChunk):
            text += event.text
        else:
            finished = event
    assert finished is not None
    return text, finished


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
        assert not continuing._streams and not continuing._tickets and not continuing._active


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


async def test_a_thousand_starts_and_aborts_leave_everything_free() -> None:
    engine = local(ScriptedModel("x" * 300))
    await engine.start()
    for count in range(1_000):
        stream = engine.submit(ask(f"r{count}"))
        if count % 2:
            await anext(stream)
        engine.abort(f"r{count}")
        _, finished = await read(stream)
        assert finished.choices[0].finish_reason is FinishReason.ABORT
    await read(engine.submit(ask("last")))
    assert engine.statistics().running <= 1
    await engine.stop()


async def test_dead_thread_fails_every_stream_and_every_submit() -> None:
    model = ScriptedModel("x" * 300)
    engine = local(model)
    await engine.start()
    streams = [engine.submit(ask(f"r{place}")) for place in range(3)]
    await anext(streams[0])

    def die(*_: object) -> None:
        raise SystemExit("killed")

    model.forward = die  # type: ignore[method-assign, assignment]
    for stream in streams:
        with pytest.raises(EngineUnavailableError, match="died"):
            await read(stream)
    assert "died" in engine.statistics().failure
    with pytest.raises(EngineUnavailableError, match="died"):
        engine.submit(ask("late"))
    await engine.stop()


async def test_event_loop_never_waits_for_a_step() -> None:
    model, gate = ScriptedModel("ab"), threading.Event()
    forward = model.forward

    def slow(*parts: object) -> object:
        assert gate.wait(10)
        return forward(*parts)  # type: ignore[arg-type]

    model.forward = slow  # type: ignore[method-assign, assignment]
    engine = local(model)
    await engine.start()
    stream = engine.submit(ask())
    engine.abort("unknown")
    assert engine.statistics().num_finished == 0  # all of this while the step hangs
    gate.set()
    assert (await read(stream))[0] == "ab"
    await engine.stop()


async def test_engine_that_cannot_load_says_why() -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        await LocalEngine(NOWHERE).start()
    with pytest.raises(EngineUnavailableError, match="has not started"):
        LocalEngine(NOWHERE).submit(ask())


async def test_what_needs_no_step_leaves_the_step_time_alone() -> None:
    engine = local(ScriptedModel("Hello."))
    await engine.start()
    await read(engine.submit(ask()))
    await read(engine.submit(replace(ask(), output=((END_OF_SEQUENCE,),))))  # the last step's report has come by then
    before = engine.statistics()
    assert before.step_ms > 0 and before.num_steps == 7
    for _ in range(50):
        await read(engine.submit(replace(ask(), output=((END_OF_SEQUENCE,),))))
    after = engine.statistics()
    assert (after.step_ms, after.num_steps) == (before.step_ms, before.num_steps)
    await engine.stop()


async def test_requests_that_are_over_are_freed() -> None:
    engine = local(ScriptedModel("Hello."))
    await engine.start()
    await asyncio.gather(*(read(engine.submit(ask(f"freed{place}"))) for place in range(200)))
    active = [thing for thing in gc.get_objects() if type(thing) is ActiveRequest]
    alive = [thing for thing in active if thing.request.request_id.startswith("freed")]
    assert not alive
    assert not engine._streams and not engine._tickets and not engine._active
    await engine.stop()


async def test_stop_during_start_ends_both() -> None:
    gate = threading.Event()

    def load(folder: Path, given: LocalEngineSettings) -> Loaded:
        assert gate.wait(10)
        return scripted(ScriptedModel())

    engine = LocalEngine(NOWHERE, load_model=load)
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(starting, stopping)
    with pytest.raises(EngineUnavailableError):
        engine.submit(ask())


async def test_stopped_engine_holds_no_model() -> None:
    model = ScriptedModel("Hello.")
    gone = weakref.ref(model)
    engine = local(model)
    await engine.start()
    await engine.stop()
    del model
    engine._load = None  # type: ignore[assignment]
    gc.collect()
    assert gone() is None


async def test_abort_while_the_prompt_is_read_frees_its_slot() -> None:
    engine = local(ScriptedModel("Hello."))
    await engine.start()
    stream = engine.submit(ask("long", "x" * 500))
    engine.abort("long")
    text, finished = await read(stream)
    assert (text, finished.choices[0].finish_reason) == ("", FinishReason.ABORT)
    assert (await read(engine.submit(ask("long"))))[0] == "Hello."
    await engine.stop()


@pytest.mark.parametrize(("num_tokens", "is_allowed"), [(510, True), (511, True), (512, False), (513, False)])
async def test_prompt_at_the_limit_of_the_context(engine: Engine, num_tokens: int, is_allowed: bool) -> None:
    if not is_allowed:
        with pytest.raises(PromptTooLongError):
            engine.submit(ask(prompt="x" * num_tokens))
        return
    _, finished = await read(engine.submit(ask(prompt="x" * num_tokens)))
    assert finished.choices[0].finish_reason is FinishReason.LENGTH
    assert finished.usage.completion_tokens == 512 - num_tokens
