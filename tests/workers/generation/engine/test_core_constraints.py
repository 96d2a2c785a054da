"""Answers that must have a form: only allowed tokens, also when guessed, continued, forked or preempted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from schemas.errors import InternalError
from schemas.tokens import FinishReason
from tests.workers.generation.engine.readers import GREEDY, Reader, request, run
from tests.workers.generation.fakes import ContextModel, PagedModel, ScriptedModel, scripted_core
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE, VOCABULARY_SIZE
from workers.generation.engine.core import EngineCore
from workers.generation.engine.protocol import EngineRequest, SamplingParams
from workers.generation.engine.sequence import Constraint
from workers.generation.engine.settings import Preemption

WORDS = (b"cab", b"cabbage", b"deed", b"abacab" * 4, b"abacab" * 4 + b"e")
WARM = SamplingParams(temperature=1.0, seed=2, max_tokens=60)


class OneOf:
    """Any of some words, byte by byte; the end of sequence behind a whole one."""

    def __init__(self, words: tuple[bytes, ...], read: bytes = b"") -> None:
        self._words = words
        self._read = read

    @property
    def is_finished(self) -> bool:
        return self._allowed() == {END_OF_SEQUENCE}

    def mask(self) -> torch.Tensor:
        bits = torch.zeros(VOCABULARY_SIZE, dtype=torch.int64)
        bits[sorted(self._allowed())] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(dim=1)
        return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)

    def accept(self, token_id: int) -> bool:
        if token_id not in self._allowed():
            return False
        self._read += bytes([token_id])
        return True

    def fork(self) -> OneOf:
        return OneOf(self._words, self._read)

    def _allowed(self) -> set[int]:
        size = len(self._read)
        open_words = [word for word in self._words if word.startswith(self._read)]
        return {word[size] if len(word) > size else END_OF_SEQUENCE for word in open_words}


def read(core: EngineCore, asked: EngineRequest, form: Constraint | None = None) -> Reader:
    reader = Reader()
    core.add(asked, reader.events.append, OneOf(WORDS) if form is None else form)
    run(core)
    return reader


@pytest.mark.parametrize("max_draft", [0, 8])
@pytest.mark.parametrize(
    "sampling", [replace(WARM, n=4), replace(WARM, n=2, repetition_penalty=1.5, top_p=0.9), GREEDY]
)
def test_each_choice_has_the_form_whatever_is_guessed(sampling: SamplingParams, max_draft: int) -> None:
    asked = request(prompt="abacab abacab abacab", sampling=sampling)
    reader = read(scripted_core(ContextModel(), max_draft=max_draft), asked)
    plain = read(scripted_core(ContextModel()), asked)
    for index, end in enumerate(reader.finished.choices):
        assert reader.text(index).encode() in WORDS
        assert end.finish_reason is FinishReason.STOP
        assert reader.token_ids(index) == plain.token_ids(index)


def test_guesses_are_kept_under_a_form() -> None:
    core = scripted_core(ContextModel(), max_draft=8)
    reader = read(core, request(prompt="abacab abacab abacab a", sampling=WARM), OneOf((b"abacab" * 5,)))
    assert reader.text() == "abacab" * 5
    assert core.statistics().num_accepted_tokens > 15


def test_answer_ends_as_soon_as_nothing_but_the_end_may_follow() -> None:
    model = ScriptedModel("cabbage patch", num_prompt=2)
    reader = read(scripted_core(model), request())
    assert (reader.text(), reader.finished.usage.completion_tokens) == ("cabbage", 7)
    assert reader.finished.choices[0].finish_reason is FinishReason.STOP
    assert model.num_steps == 7


def test_a_form_that_is_cut_by_max_tokens_is_not_called_complete() -> None:
    reader = read(
        scripted_core(ScriptedModel("cabbage", num_prompt=2)), request(sampling=replace(GREEDY, max_tokens=5))
    )
    assert (reader.text(), reader.finished.choices[0].finish_reason) == ("cabba", FinishReason.LENGTH)


def test_a_form_goes_on_where_an_earlier_run_was_cut() -> None:
    core = scripted_core(ContextModel())
    asked = request(sampling=replace(WARM, n=3))
    whole = read(core, asked)
    for cut in range(max(len(whole.token_ids(index)) for index in range(3)) + 1):
        output = tuple(whole.token_ids(index)[:cut] for index in range(3))
        again = read(core, replace(asked, output=output))
        assert [again.token_ids(index) for index in range(3)] == [whole.token_ids(index) for index in range(3)]
        assert again.finished.choices == whole.finished.choices


def test_output_that_has_not_the_form_fails_its_request_alone() -> None:
    core, good, bad = scripted_core(ScriptedModel("cab", num_prompt=2)), Reader(), Reader()
    core.add(request("good"), good.events.append)
    assert core.add(replace(request("bad"), output=(tuple(b"cx"),)), bad.events.append, OneOf(WORDS)) is None
    run(core)
    assert isinstance(bad.events[-1], InternalError)
    assert good.text() == "cab"


def test_a_form_that_allows_nothing_fails_its_request_alone() -> None:
    core, good, bad = scripted_core(ScriptedModel("cab", num_prompt=2)), Reader(), Reader()
    core.add(request("good"), good.events.append)
    core.add(request("bad"), bad.events.append, OneOf(()))
    run(core)
    assert isinstance(bad.events[-1], InternalError)
    assert good.text() == "cab"


class Breaking(OneOf):
    """Breaks behind its first byte."""

    def mask(self) -> torch.Tensor:
        if self._read:
            raise LookupError("no such state")
        return super().mask()

    def fork(self) -> Breaking:
        return Breaking(self._words, self._read)


def test_a_form_that_breaks_fails_its_request_alone() -> None:
    core, good, bad = scripted_core(ScriptedModel("cab", num_prompt=2)), Reader(), Reader()
    core.add(request("bad", sampling=replace(GREEDY, n=2)), bad.events.append, Breaking(WORDS))
    core.add(request("good"), good.events.append, OneOf(WORDS))
    run(core)
    assert isinstance(bad.events[-1], InternalError)
    assert good.text() == "cab"


@pytest.mark.parametrize("preemption", Preemption)
def test_forms_survive_preemption(preemption: Preemption) -> None:
    sampling = replace(WARM, temperature=3.0)
    asked = [request(str(place), "abacab ", replace(sampling, seed=place, n=1 + place % 2)) for place in range(4)]
    model: PagedModel = ContextModel("abcdeg", num_blocks=10, block_size=4)
    core = scripted_core(model, max_draft=4, preemption=preemption, swap_blocks=50)
    readers = [Reader() for _ in asked]
    for each, reader in zip(asked, readers, strict=True):
        core.add(each, reader.events.append, OneOf(WORDS[3:]))
    run(core)
    assert core.statistics().num_preemptions > 0
    for each, reader in zip(asked, readers, strict=True):
        plain = read(scripted_core(ContextModel("abcdeg")), each, OneOf(WORDS[3:]))
        for index in range(each.sampling.n):
            assert reader.token_ids(index) == plain.token_ids(index)
