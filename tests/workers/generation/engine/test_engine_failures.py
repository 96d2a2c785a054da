"""A hang, a model that is out of memory, a constraint: what becomes of the requests, and of those beside them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import EngineUnavailableError, InternalError, InvalidRequestError
from schemas.tokens import FinishReason
from tests.workers.generation.engine.asking import GREEDY, NOWHERE, ask, assert_at_rest, local, read
from tests.workers.generation.fakes import ScriptedModel, scripted
from workers.generation.engine.batch import StepBatch
from workers.generation.engine.loader import Loaded
from workers.generation.engine.local import LocalEngine
from workers.generation.engine.protocol import ConstraintKind, ConstraintSpec
from workers.generation.engine.settings import LocalEngineSettings

DIGITS = ConstraintSpec(kind=ConstraintKind.REGEX, value="[0-9]+")


class Hanging(ScriptedModel):
    """Makes `num_steps_left` steps, then hangs until it is let go."""

    def __init__(self, num_steps_left: int) -> None:
        super().__init__("x" * 300)
        self.num_steps_left = num_steps_left
        self.go = threading.Event()
        self.hangs = threading.Event()

    def forward(self, batch: StepBatch) -> torch.Tensor:
        if self.num_steps_left == 0:
            self.hangs.set()
            assert self.go.wait(30)
        self.num_steps_left -= 1
        return super().forward(batch)


@pytest.mark.parametrize("num_steps", [0, 5])
async def test_a_step_that_hangs_ends_every_stream_and_later_submits(num_steps: int) -> None:
    """Their requests are left to the next owner; the worker says that it has failed."""
    model = Hanging(num_steps)
    engine = local(model, step_limit_s=0.08)
    await engine.start()
    streams = [engine.submit(ask(f"r{place}")) for place in range(3)]
    for stream in streams:
        with pytest.raises(EngineUnavailableError, match="no step for"):
            await read(stream)
    assert "no step for" in engine.statistics().failure
    with pytest.raises(EngineUnavailableError, match="no step for"):
        engine.submit(ask("late"))
    await engine.stop()  # bounded, though the thread hangs
    model.go.set()
    engine._thread.join(10)
    assert not engine._thread._thread.is_alive()  # it came back, and ended


async def test_work_that_waits_behind_a_hang_is_seen_from_outside() -> None:
    model = Hanging(0)
    engine = local(model)
    await engine.start()
    stream = engine.submit(ask())
    await asyncio.to_thread(model.hangs.wait, 10)
    assert engine.statistics().waiting == 1  # though the thread has told nothing of it
    model.go.set()
    engine.abort("r")
    await read(stream)
    await engine.stop()


async def test_an_idle_engine_is_never_taken_for_one_that_hangs() -> None:
    engine = local(ScriptedModel("Hello."), step_limit_s=0.02)
    await engine.start()
    for place in range(5):
        await asyncio.sleep(0.03)
        assert (await read(engine.submit(ask(f"r{place}"))))[0] == "Hello."
    await engine.stop()


async def test_out_of_memory_shrinks_the_batch_and_everybody_gets_their_answer() -> None:
    model = ScriptedModel("Hello.")
    model.max_rows = 3
    engine = local(model, max_sequences=8)
    await engine.start()
    results = await asyncio.gather(
        *(read(engine.submit(ask(f"r{place}"))) for place in range(8)), return_exceptions=True
    )
    failed = [result for result in results if isinstance(result, BaseException)]
    assert len(failed) <= 1 and all(isinstance(error, InternalError) for error in failed)
    assert {result[0] for result in results if not isinstance(result, BaseException)} == {"Hello."}
    assert_at_rest(engine)
    await engine.stop()


# Constraints are compiled off the event loop and off the step loop


class Compiler:
    """Compiles to a constraint that allows everything, when it is let go; `error` is raised instead."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go = threading.Event()
        self.begun = threading.Event()
        self.threads: set[str] = set()
        self._error = error

    def compile(self, spec: ConstraintSpec) -> Any:
        self.threads.add(threading.current_thread().name)
        self.begun.set()
        assert self.go.wait(10)
        if self._error is not None:
            raise self._error
        return Anything()


class Anything:
    is_finished = False

    def mask(self) -> torch.Tensor:
        return torch.full((16,), -1, dtype=torch.int32)

    def accept(self, token_id: int) -> bool:
        return True

    def fork(self) -> Anything:
        return self


def compiling(compile_constraint: Callable[[ConstraintSpec], Any]) -> LocalEngine:
    def load(folder: Path, given: LocalEngineSettings) -> Loaded:
        return replace(scripted(ScriptedModel("7 and 8"), max_context=512), compile_constraint=compile_constraint)

    return LocalEngine(NOWHERE, LocalEngineSettings(max_sequences=4, max_context=512), load_model=load)


CONSTRAINED = replace(ask("constrained"), sampling=replace(GREEDY, constraint=DIGITS))


async def test_others_are_answered_while_a_constraint_is_compiled() -> None:
    compiler = Compiler()
    engine = compiling(compiler.compile)
    await engine.start()
    stream = engine.submit(CONSTRAINED)
    await asyncio.to_thread(compiler.begun.wait, 10)
    assert (await read(engine.submit(ask("free"))))[0] == "7 and 8"
    compiler.go.set()
    assert (await read(stream))[0] == "7 and 8"
    (name,) = compiler.threads
    assert name.startswith("gea-constraint")
    assert_at_rest(engine)
    await engine.stop()


async def test_abort_during_compilation_ends_the_stream_at_once() -> None:
    compiler = Compiler()
    engine = compiling(compiler.compile)
    await engine.start()
    stream = engine.submit(replace(CONSTRAINED, output=((55, 32),)))
    engine.abort("constrained")
    text, finished = await read(stream)
    assert (text, finished.choices[0].finish_reason) == ("7 ", FinishReason.ABORT)  # what was drawn before stays
    compiler.go.set()
    await read(engine.submit(ask("after")))
    assert_at_rest(engine)
    await engine.stop()


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (InvalidRequestError("response_format: no grammar", field="response_format"), InvalidRequestError),
        (RuntimeError("the compiler crashed"), InternalError),
    ],
)
async def test_a_constraint_that_cannot_be_compiled_ends_its_request_alone(
    error: Exception, expected: type[Exception]
) -> None:
    compiler = Compiler(error)
    compiler.go.set()
    engine = compiling(compiler.compile)
    await engine.start()
    neighbour = engine.submit(ask("free"))
    with pytest.raises(expected, match="response_format"):
        await read(engine.submit(CONSTRAINED))
    assert (await read(neighbour))[0] == "7 and 8"
    assert_at_rest(engine)
    await engine.stop()


async def test_stop_during_compilation_ends_the_stream() -> None:
    compiler = Compiler()
    engine = compiling(compiler.compile)
    await engine.start()
    stream = engine.submit(CONSTRAINED)
    await asyncio.to_thread(compiler.begun.wait, 10)
    await engine.stop()
    with pytest.raises(EngineUnavailableError):
        await read(stream)
    compiler.go.set()


async def test_a_model_without_constraints_refuses_them_by_name() -> None:
    engine = local(ScriptedModel("Hello."))
    await engine.start()
    with pytest.raises(InvalidRequestError, match="response_format"):
        await read(engine.submit(CONSTRAINED))
    await engine.stop()
