"""The in-process engine: its thread, its event loop, and what is left behind."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pytest

from schemas.errors import ConfigError, EngineUnavailableError
from schemas.tokens import FinishReason
from tests.workers.generation.engine.asking import NOWHERE, ask, assert_at_rest, local, read
from tests.workers.generation.fakes import ScriptedModel, scripted
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE
from workers.generation.engine.loader import Loaded
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.sequence import ActiveRequest
from workers.generation.engine.settings import LocalEngineSettings


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
    assert_at_rest(engine)
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
