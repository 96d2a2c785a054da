"""An answer that is cut anywhere and continued is the undisturbed one: text, tokens, ends and usage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import InternalError
from schemas.tokens import FinishReason
from tests.workers.generation.fakes import ContextModel, ScriptedModel, assert_at_rest, scripted_core
from workers.generation.engine.byte_tokenizer import END_OF_SEQUENCE
from workers.generation.engine.core import EngineCore
from workers.generation.engine.protocol import ChoiceEnd, EngineEvent, EngineRequest, Finished, SamplingParams
from workers.generation.engine.protocol import TokenChunk as Chunk

HARD_TEXT = "🌶️ 你好 é👨‍👩‍👧 e\u0301."
GREEDY = SamplingParams(temperature=0, max_tokens=40)
WARM = SamplingParams(temperature=1.0, seed=8, max_tokens=40)
SAMPLINGS = {
    "greedy": GREEDY,
    "sampled": WARM,
    "top_p": replace(WARM, top_p=0.7),
    "top_k": replace(WARM, top_k=3),
    "min_p": replace(WARM, min_p=0.2),
    "repetition": replace(WARM, repetition_penalty=1.7),
    "repetition_greedy": replace(GREEDY, repetition_penalty=1.3),
    "presence": replace(WARM, presence_penalty=1.5),
    "frequency": replace(WARM, frequency_penalty=0.4),
    "all_penalties": replace(
        WARM, top_p=0.95, repetition_penalty=1.3, presence_penalty=-0.7, frequency_penalty=0.6, logit_bias={97: 1.0}
    ),
    "logit_bias": replace(WARM, logit_bias={98: 1.5, END_OF_SEQUENCE: -5.0}),
    "stop": replace(WARM, logit_bias={END_OF_SEQUENCE: -50.0}, stop=("abd", "hhd", "ca.fx")),
    "long_stop": replace(WARM, logit_bias={END_OF_SEQUENCE: -50.0}, stop=("gdhc. d h", "c.echdx"), max_tokens=200),
    "stop_ids": replace(WARM, logit_bias={END_OF_SEQUENCE: -50.0}, stop_token_ids=frozenset({ord("h")})),
    "eos_as_stop_id": replace(WARM, stop_token_ids=frozenset({END_OF_SEQUENCE})),
    "length": replace(WARM, logit_bias={END_OF_SEQUENCE: -50.0}, max_tokens=9),
}


@dataclass
class Outcome:
    """What a reader has at the end."""

    token_ids: list[tuple[int, ...]]
    texts: list[str]
    ends: tuple[ChoiceEnd, ...]
    usage: tuple[int, int]


def outcome(events: Sequence[EngineEvent | Exception], n: int = 1) -> Outcome:
    *chunks, finished = events
    assert isinstance(finished, Finished)
    found = Outcome([()] * n, [""] * n, finished.choices, _usage(finished))
    for chunk in chunks:
        assert isinstance(chunk, Chunk)
        found.token_ids[chunk.index] += chunk.token_ids
        found.texts[chunk.index] += chunk.text
    assert finished.usage.completion_tokens == sum(map(len, found.token_ids))
    assert [end.num_tokens for end in finished.choices] == [len(ids) for ids in found.token_ids]
    return found


def _usage(finished: Finished) -> tuple[int, int]:
    return finished.usage.prompt_tokens, finished.usage.completion_tokens


def ask(sampling: SamplingParams, output: tuple[tuple[int, ...], ...] = (), prompt: str = "Hello") -> EngineRequest:
    return EngineRequest(request_id="r", prompt=tuple(prompt.encode()), sampling=sampling, output=output)


def run(core: EngineCore, max_steps: int = 1_000) -> None:
    for _ in range(max_steps):
        if core.is_idle:
            assert_at_rest(core)
            return
        core.step()
    raise AssertionError("the engine does not come to rest")


def answer(core: EngineCore, request: EngineRequest) -> Outcome:
    events: list[EngineEvent | Exception] = []
    core.add(request, events.append)
    run(core)
    return outcome(events, request.sampling.n)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize(("prefill_chunk", "max_draft"), [(3, 0), (64, 8)])
def test_an_answer_cut_anywhere_goes_on_as_it_would_have(name: str, prefill_chunk: int, max_draft: int) -> None:
    core = scripted_core(ContextModel(block_size=4), prefill_chunk=prefill_chunk, max_draft=max_draft)
    sampling = SAMPLINGS[name]
    whole = answer(core, ask(sampling))
    assert len(whole.token_ids[0]) > 3
    for cut in range(len(whole.token_ids[0]) + 1):
        assert answer(core, ask(sampling, (whole.token_ids[0][:cut],))) == whole


def test_the_cases_end_in_every_way() -> None:
    core = scripted_core(ContextModel())
    ends = {name: answer(core, ask(sampling)).ends[0] for name, sampling in SAMPLINGS.items()}
    assert (ends["stop"].stop_reason, ends["long_stop"].stop_reason) == ("hhd", "gdhc. d h")
    assert ends["stop_ids"].stop_reason == ord("h")
    assert ends["eos_as_stop_id"].stop_reason == END_OF_SEQUENCE
    assert ends["length"].finish_reason is FinishReason.LENGTH
    assert (ends["sampled"].finish_reason, ends["sampled"].stop_reason) == (FinishReason.STOP, None)


@pytest.mark.parametrize("stop", [(), ("👩",), ("é👨",), (" e", "\u0301."), ("not there",)])
def test_characters_and_stop_strings_over_the_cut_are_whole(stop: tuple[str, ...]) -> None:
    core = scripted_core(ScriptedModel(HARD_TEXT, num_prompt=5))
    sampling = replace(GREEDY, max_tokens=200, stop=stop)
    whole = answer(core, ask(sampling))
    assert whole.texts[0] == min((HARD_TEXT.partition(text)[0] for text in stop), key=len, default=HARD_TEXT)
    for cut in range(len(whole.token_ids[0]) + 1):
        assert answer(core, ask(sampling, (whole.token_ids[0][:cut],))) == whole


@pytest.mark.parametrize("name", ["sampled", "all_penalties", "stop", "length"])
def test_each_choice_goes_on_from_its_own_cut(name: str) -> None:
    core = scripted_core(ContextModel(block_size=4), prefill_chunk=4)
    sampling = replace(SAMPLINGS[name], n=3)
    whole = answer(core, ask(sampling))
    assert len(set(whole.token_ids)) == 3
    cuts = [sorted({0, 1, len(ids) // 2, len(ids)}) for ids in whole.token_ids]
    for chosen in product(*cuts):
        output = tuple(ids[:cut] for ids, cut in zip(whole.token_ids, chosen, strict=True))
        assert answer(core, ask(sampling, output)) == whole
    for given_choices in range(3):
        assert answer(core, ask(sampling, tuple(ids[:2] for ids in whole.token_ids[:given_choices]))) == whole


def test_continued_and_new_requests_do_not_touch_each_other() -> None:
    requests = [
        ask(replace(WARM, seed=seed, n=1 + seed % 2, max_tokens=20), prompt="p" * (seed + 1)) for seed in range(9)
    ]
    alone = [answer(scripted_core(ContextModel()), request) for request in requests]
    cut = [tuple(ids[: place % 5 * 3] for ids in whole.token_ids) for place, whole in enumerate(alone)]
    core = scripted_core(ContextModel(block_size=2), prefill_chunk=3)
    events: list[list[EngineEvent | Exception]] = [[] for _ in requests]
    for request, output, received in zip(requests, cut, events, strict=True):
        core.add(replace(request, output=output), received.append)
        core.step()
    run(core)
    assert [outcome(received, request.sampling.n) for received, request in zip(events, requests, strict=True)] == alone


def test_given_tokens_come_first_one_by_one_and_without_logprobs() -> None:
    core, sampling = scripted_core(ScriptedModel("Hello", num_prompt=5)), replace(GREEDY, logprobs=1)
    events: list[EngineEvent | Exception] = []
    core.add(ask(sampling, (tuple(b"Hel"),)), events.append)
    assert [event.text for event in events if isinstance(event, Chunk)] == ["H", "e", "l"]  # before any step
    run(core)
    chunks = [event for event in events if isinstance(event, Chunk)]
    assert [chunk.logprobs is None for chunk in chunks] == [True] * 3 + [False] * 3


@pytest.mark.parametrize("name", ["sampled", "stop", "stop_ids", "length"])
def test_an_answer_that_was_whole_needs_neither_step_nor_slot(name: str) -> None:
    model = ContextModel()
    core = scripted_core(model, num_slots=2)
    sampling = replace(SAMPLINGS[name], n=2)
    whole = answer(core, ask(sampling))
    core.add(ask(replace(WARM, n=2)), lambda event: None)
    core.step()  # takes both slots
    num_steps, events = model.num_steps, list[EngineEvent | Exception]()
    assert core.add(ask(sampling, tuple(whole.token_ids)), events.append) is None
    assert outcome(events, 2) == whole
    assert model.num_steps == num_steps


def test_choices_that_were_whole_hold_no_slot() -> None:
    core = scripted_core(ContextModel(), num_slots=3)
    sampling = replace(WARM, n=3)
    whole = answer(core, ask(sampling))
    output = (whole.token_ids[0], whole.token_ids[1][:2], whole.token_ids[2])
    events: list[EngineEvent | Exception] = []
    core.add(ask(replace(WARM, n=2)), lambda event: None)
    core.add(ask(sampling, output), events.append)
    core.step()
    assert (core.scheduler.num_running, core.scheduler.num_waiting) == (2, 0)
    run(core)
    assert outcome(events, 3) == whole


@pytest.mark.parametrize(
    ("output", "max_tokens", "reason", "num_tokens"),
    [
        (b"Hello", 3, FinishReason.LENGTH, 3),
        (b"x" * 500, 400, FinishReason.LENGTH, 27),  # all that the context has left
        (b"He" + bytes(1), 40, FinishReason.STOP, 3),
    ],
)
def test_given_tokens_beyond_the_end_are_left_out(
    output: bytes, max_tokens: int, reason: FinishReason, num_tokens: int
) -> None:
    core = scripted_core(ScriptedModel("Hello"), max_context=32)
    sampling = replace(GREEDY, max_tokens=max_tokens, stop_token_ids=frozenset({0}))
    found = answer(core, ask(sampling, ((*output, *b"more"),)))
    assert (found.ends[0].finish_reason, found.ends[0].num_tokens) == (reason, num_tokens)
    assert found.token_ids[0] == tuple(output[:num_tokens])


def test_abort_while_given_tokens_are_read_frees_the_slots_and_counts_them() -> None:
    core = scripted_core(ContextModel(block_size=4), prefill_chunk=4)
    for num_steps in range(8):
        events: list[EngineEvent | Exception] = []
        active = core.add(
            ask(replace(SAMPLINGS["long_stop"], stop=(), n=2), (tuple(b"abcabcabcabc"), tuple(b"cab"))), events.append
        )
        assert active is not None
        for _ in range(num_steps):
            core.step()
        core.abort(active)
        found = outcome(events, 2)
        assert [end.finish_reason for end in found.ends] == [FinishReason.ABORT] * 2
        assert found.usage[1] >= 15
        assert_at_rest(core)


def test_given_tokens_that_cannot_be_read_fail_their_request_alone() -> None:
    model = ScriptedModel("Hello.", num_prompt=5)
    core = scripted_core(model)
    good, bad = list[EngineEvent | Exception](), list[EngineEvent | Exception]()
    core.add(ask(GREEDY), good.append)
    core.step()
    model.fails = frozenset({200})
    core.add(ask(replace(GREEDY, n=2), ((1, 2), (3, 200))), bad.append)
    run(core)
    assert outcome(good).texts == ["Hello."]
    assert isinstance(bad[-1], InternalError)


def test_time_to_the_first_new_token_is_prefill() -> None:
    now = iter(range(100))
    core = scripted_core(ContextModel(block_size=2), prefill_chunk=2, clock=lambda: float(next(now)))
    events: list[EngineEvent | Exception] = []
    core.add(ask(GREEDY, (tuple(b"abcabc"),)), events.append)  # submitted at 0
    run(core)
    finished = events[-1]
    assert isinstance(finished, Finished)
    assert (finished.queue_ms, finished.prefill_ms) == (1_000, 6_000)  # chunks of prompt and output


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.lists(st.integers(0, 511), max_size=30), max_size=3),
            st.integers(3, 4),
            st.sampled_from(["add", "abort", "step"]),
        ),
        max_size=12,
    )
)
def test_whatever_is_given_every_request_ends_once_and_frees_its_slots(
    asked: list[tuple[list[list[int]], int, str]],
) -> None:
    core, readers, active = scripted_core(ContextModel(block_size=2), prefill_chunk=3), [], []
    for output, n, action in asked:
        readers.append((n, list[EngineEvent | Exception]()))
        sampling = replace(WARM, n=n, max_tokens=20, stop=("\x01", "ab"))
        active.append(core.add(ask(sampling, tuple(map(tuple, output))), readers[-1][1].append))
        if action == "abort" and active[0] is not None:
            core.abort(active[0])
        elif action == "step":
            core.step()
    run(core)
    for n, events in readers:
        outcome(events, n)
