"""A failure ends the request that it belongs to, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from schemas.errors import EngineUnavailableError, InternalError
from tests.workers.generation.engine.readers import GREEDY, Reader, answer, request, run
from tests.workers.generation.fakes import ScriptedModel, scripted_core
from workers.generation.engine.batch import StepBatch
from workers.generation.engine.byte_tokenizer import ByteTokenizer
from workers.generation.engine.core import EngineCore
from workers.generation.engine.limits import Limits
from workers.generation.engine.protocol import EngineRequest


def test_failing_step_costs_only_the_request_that_fails_alone() -> None:
    model = ScriptedModel("ab")
    core = scripted_core(model)
    good, bad = Reader(), Reader()
    core.add(request("good"), good.events.append)
    core.step()
    model.fails = frozenset({200})
    core.add(EngineRequest(request_id="bad", prompt=(200,), sampling=GREEDY), bad.events.append)
    run(core)
    assert good.text() == "ab"
    assert isinstance(bad.events[-1], InternalError)


def test_fault_in_one_sampling_spares_the_neighbours() -> None:
    model = ScriptedModel("abc")
    core = scripted_core(model)
    bad, good = Reader(), Reader()
    core.add(request("bad", "Oh"), bad.events.append)
    core.add(request("good"), good.events.append)
    core.step()
    model.broken = frozenset({ord("O")})
    run(core)
    assert isinstance(bad.events[-1], InternalError)
    assert good.text() == "abc"


def test_model_that_fails_for_everybody_again_and_again_is_given_up() -> None:
    model = ScriptedModel()
    model.fails = frozenset(range(512))
    core = scripted_core(model)
    core.add(request("1"), Reader().events.append)
    core.step()
    core.add(request("2"), Reader().events.append)
    core.step()
    core.add(request("3"), Reader().events.append)
    with pytest.raises(RuntimeError, match="3 steps in a row"):
        core.step()


class GoneModel(ScriptedModel):
    """A model whose process has ended."""

    def forward(self, batch: StepBatch) -> torch.Tensor:
        raise EngineUnavailableError("rank 1 of 2 has ended")


def test_a_runner_that_is_gone_ends_the_engine_at_once() -> None:
    core = scripted_core(GoneModel())
    core.add(request("1"), Reader().events.append)
    with pytest.raises(EngineUnavailableError, match="rank 1"):
        core.step()


class BrokenBytes(ByteTokenizer):
    """Cannot say what the letter e stands for."""

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == ord("e"):
            raise LookupError("no bytes")
        return super().token_bytes(token_id)


def test_text_that_cannot_be_made_fails_its_request_alone() -> None:
    model = ScriptedModel("Hello.")
    core = EngineCore(model, BrokenBytes(), max_context=512, limits=Limits())
    broken, fine = Reader(), Reader()
    core.add(request("broken"), broken.events.append)
    core.add(request("fine", sampling=replace(GREEDY, max_tokens=1)), fine.events.append)
    run(core)
    assert isinstance(broken.events[-1], InternalError)
    assert fine.text() == "H"


def test_block_that_cannot_be_copied_fails_its_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ScriptedModel("Hello.")

    def copy_block(source: int, target: int) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(model, "copy_block", copy_block)
    core = scripted_core(model)
    many, fine = Reader(), Reader()
    core.add(request("many", sampling=replace(GREEDY, n=2)), many.events.append)
    core.add(request("fine"), fine.events.append)
    run(core)
    assert isinstance(many.events[-1], InternalError)
    assert fine.text() == "Hello."


def test_blocks_of_a_failed_request_are_cleared_before_their_next_owner() -> None:
    model = ScriptedModel("Hello.", block_size=4)
    core = scripted_core(model)
    prompt = "a long prompt"
    assert answer(core, request(prompt=prompt)).text() == "Hello."
    model.broken = frozenset({ord("p")})
    bad = answer(core, request(prompt=prompt))
    assert isinstance(bad.events[-1], InternalError)
    assert {0, 1, 2} < set(model.cleared)  # shared ones, too: it may be they that are broken
    model.broken = frozenset()
    again = answer(core, request(prompt=prompt))
    assert (again.text(), again.finished.usage.cached_tokens) == ("Hello.", 0)


def test_failed_step_leaves_what_was_read_before_in_the_prefix_cache() -> None:
    model = ScriptedModel("Hello.", block_size=4)
    core = scripted_core(model)
    assert answer(core, request(prompt="a long prompt")).text() == "Hello."
    model.fails = frozenset({ord("!")})
    assert isinstance(answer(core, request(prompt="a long one!")).events[-1], InternalError)
    again = answer(core, request(prompt="a long prompt"))
    assert (again.text(), again.finished.usage.cached_tokens) == ("Hello.", 12)


def test_neighbour_that_shares_blocks_of_a_failed_request_goes_on_and_leaves_none_of_them_behind() -> None:
    model = ScriptedModel("Hello.", block_size=4, num_prompt=9)
    core = scripted_core(model)
    good, bad = Reader(), Reader()
    core.add(request("good", "12345678a"), good.events.append)
    for _ in range(3):
        core.step()
    active = core.add(request("bad", "12345678b"), bad.events.append)
    model.broken = frozenset({ord("b")})
    core.step()
    assert active is not None and active.num_cached == 8
    run(core)
    assert good.text() == "Hello."
    assert isinstance(bad.events[-1], InternalError)
    model.broken = frozenset()
    assert answer(core, request(prompt="12345678c")).finished.usage.cached_tokens == 0


def test_step_that_is_too_large_is_halved_and_the_next_ones_are_smaller_for_a_while() -> None:
    model = ScriptedModel("Hello.", num_prompt=40)
    core = scripted_core(model, max_batched_tokens=64)
    model.max_rows = 12
    readers = [Reader() for _ in range(3)]
    for place, reader in enumerate(readers):
        core.add(request(str(place), str(place) * 40), reader.events.append)
    run(core)
    assert [reader.text() for reader in readers] == ["Hello."] * 3
    assert core.scheduler.budget.num_tokens < 12
    model.max_rows = None
    run_on = answer(core, request("long", "x" * 40, replace(GREEDY, max_tokens=400)))
    assert run_on.text() == "Hello."
    for _ in range(60):
        answer(core, request("on", "y" * 40))
    assert core.scheduler.budget.num_tokens == 64


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_one_token_that_does_not_fit_ends_its_request_alone(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ScriptedModel("Hello.", num_prompt=5)
    core = scripted_core(model)
    forward = model.forward

    def limited(batch: object) -> object:
        if any(ord("?") in segment.token_ids for segment in batch.segments):  # type: ignore[attr-defined]
            raise error("not this one")
        return forward(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(model, "forward", limited)
    readers = [Reader() for _ in range(4)]
    for place, (reader, prompt) in enumerate(zip(readers, ("aaaaa", "bb?bb", "ccccc", "ddddd"), strict=True)):
        core.add(request(str(place), prompt), reader.events.append)
    run(core)
    assert isinstance(readers[1].events[-1], InternalError)
    assert [reader.text() for reader in readers if reader is not readers[1]] == ["Hello."] * 3


def test_guess_that_the_model_cannot_run_costs_nothing() -> None:
    model = ScriptedModel("abcabd", num_prompt=6)
    core = scripted_core(model, max_draft=4)
    model.fails = frozenset({ord("!")})
    found = Reader()
    active = core.add(request(prompt="xabxab"), found.events.append)
    assert active is not None
    sequence = active.sequences[0]
    sequence.lookup.propose = lambda tokens, max_draft: [ord("!")] * max_draft  # type: ignore[method-assign]
    run(core)
    assert found.text() == "abcabd"
