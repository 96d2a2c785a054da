from __future__ import annotations

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.tokens import FinishReason
from tests.workers.generation.engine.readers import GREEDY, Reader, answer, request, run
from tests.workers.generation.fakes import ContextModel, ScriptedModel, assert_at_rest, scripted_core
from workers.generation.engine.protocol import Finished, SamplingParams, TokenChunk
from workers.generation.engine.sequence import ActiveRequest, State
from workers.generation.engine.settings import Preemption


def test_answer_ends_at_end_of_sequence_and_counts_it() -> None:
    reader = answer(scripted_core(ScriptedModel("Hello 🌶️ 你好")), request())
    assert reader.text() == "Hello 🌶️ 你好"
    assert reader.finished.choices[0].finish_reason is FinishReason.STOP
    assert reader.finished.usage.completion_tokens == reader.num_tokens() == len("Hello 🌶️ 你好".encode()) + 1
    assert reader.finished.usage.prompt_tokens == 2


def test_max_tokens_cuts_and_says_length() -> None:
    reader = answer(scripted_core(ScriptedModel("Hello")), request(sampling=replace(GREEDY, max_tokens=3)))
    assert reader.text() == "Hel"
    assert reader.finished.choices[0].finish_reason is FinishReason.LENGTH


def test_context_bounds_max_tokens() -> None:
    reader = answer(scripted_core(ScriptedModel("x" * 50), max_context=12), request(prompt="12345678"))
    assert reader.text() == "xxxx"
    assert reader.finished.choices[0].finish_reason is FinishReason.LENGTH


def test_stop_string_is_cut_and_named() -> None:
    reader = answer(scripted_core(ScriptedModel("one two three")), request(sampling=replace(GREEDY, stop=(" tw",))))
    assert reader.text() == "one"
    assert reader.finished.choices[0].stop_reason == " tw"
    assert reader.finished.usage.completion_tokens == reader.num_tokens() == 6


def test_stop_token_ends_without_its_text() -> None:
    sampling = replace(GREEDY, stop_token_ids=frozenset({ord("l")}))
    reader = answer(scripted_core(ScriptedModel("Hello")), request(sampling=sampling))
    assert reader.text() == "He"
    assert reader.finished.choices[0].stop_reason == ord("l")


def test_long_prompt_is_read_in_chunks_while_others_decode() -> None:
    core = scripted_core(ScriptedModel("abcdef", block_size=4), prefill_chunk=4)
    first, second = Reader(), Reader()
    core.add(request("a"), first.events.append)
    core.step()
    core.add(request("b", prompt="x" * 10), second.events.append)
    before = len(first.events)
    core.step()
    core.step()
    assert len(first.events) == before + 2  # one token in each step of the other's prefill
    assert not second.events
    run(core)
    assert first.text() == second.text() == "abcdef"


def test_n_choices_share_one_prefill_and_end_apart() -> None:
    model = ScriptedModel("ab", peak=6.0)
    core = scripted_core(model)
    reader = answer(core, request(sampling=SamplingParams(n=3, temperature=1.0, seed=5, max_tokens=20)))
    assert model.batches[0] == [(0, 2, 1)]
    assert [end.index for end in reader.finished.choices] == [0, 1, 2]
    assert len({reader.token_ids(index) for index in range(3)}) > 1
    assert reader.finished.usage.completion_tokens == reader.num_tokens()


def test_more_requests_than_slots_wait_in_order() -> None:
    core = scripted_core(ScriptedModel("ab"), num_slots=2)
    order: list[str] = []
    for name in "abcde":
        core.add(request(name), lambda event, name=name: order.append(name) if isinstance(event, Finished) else None)  # type: ignore[misc]
    core.step()
    assert (core.scheduler.num_running, core.scheduler.num_waiting) == (2, 3)
    run(core)
    assert order == list("abcde")


def test_abort_takes_effect_at_once_wherever_the_request_is() -> None:
    core = scripted_core(ScriptedModel("x" * 90, block_size=2), num_slots=1, prefill_chunk=2)
    readers = [Reader() for _ in range(3)]
    decoding, prefilling, waiting = (
        core.add(request(str(place), prompt="abc"), reader.events.append) for place, reader in enumerate(readers)
    )
    assert decoding and prefilling and waiting
    for _ in range(3):
        core.step()
    core.abort(waiting)
    core.abort(decoding)
    core.step()
    core.abort(prefilling)
    core.abort(prefilling)
    assert core.is_idle
    assert core.scheduler.pool.num_active == 0
    assert [reader.finished.choices[0].finish_reason for reader in readers] == [FinishReason.ABORT] * 3
    assert readers[0].finished.usage.completion_tokens == readers[0].num_tokens() == 2


def test_a_thousand_aborts_leak_no_block() -> None:
    core = scripted_core(ScriptedModel("x" * 90))
    for count in range(1_000):
        active = core.add(request(str(count)), lambda event: None)
        assert active is not None
        if count % 3:
            core.step()
        core.abort(active)
    assert_at_rest(core)


def test_a_thousand_starts_and_aborts_in_every_phase_leave_nothing_and_cost_no_speed() -> None:
    model = ContextModel("ab", num_blocks=14, block_size=4)
    core = scripted_core(model, max_draft=4, preemption=Preemption.SWAP, swap_blocks=12, prefill_chunk=4)
    first = answer(core, request("first", "ab" * 8))
    num_steps = model.num_steps
    chance, flying = Random(7), list[ActiveRequest]()
    states = set[State]()
    for count in range(1_000):
        sampling = replace(GREEDY, n=chance.choice((1, 1, 2)))
        added = core.add(request(str(count), chance.choice("ab") * chance.randint(1, 16), sampling), lambda event: None)
        assert added is not None
        flying.append(added)
        for _ in range(chance.randint(0, 2)):
            core.step()
        if len(flying) > 4:
            gone = flying.pop(chance.randrange(5))
            states |= {sequence.state for sequence in gone.sequences}
            core.abort(gone)
    for gone in flying:
        core.abort(gone)
    assert states >= {State.WAITING, State.FOLLOWING, State.RUNNING, State.SWAPPED}
    assert_at_rest(core)
    before = model.num_steps
    assert answer(core, request("last", "ab" * 8)).token_ids() == first.token_ids()
    assert model.num_steps - before <= num_steps


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["add", "abort", "step"]), st.integers(1, 3), st.integers(1, 9)), max_size=40)
)
def test_any_order_of_events_ends_every_request_once_and_frees_all_blocks(events: list[tuple[str, int, int]]) -> None:
    core = scripted_core(ScriptedModel("abcd", block_size=2), num_slots=3, prefill_chunk=3)
    readers, active = [], []
    for kind, n, length in events:
        if kind == "add":
            readers.append(Reader())
            added = core.add(request(prompt="x" * length, sampling=replace(GREEDY, n=n)), readers[-1].events.append)
            active.append(added)
        elif kind == "abort" and active and active[length % len(active)] is not None:
            core.abort(active[length % len(active)])  # type: ignore[arg-type]
        else:
            core.step()
    run(core)
    for reader in readers:
        assert reader.finished.usage.completion_tokens == reader.num_tokens()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.builds(
            SamplingParams,
            max_tokens=st.integers(1, 12),
            temperature=st.sampled_from([0.0, 1e-6, 0.7, 2.0]),
            top_p=st.sampled_from([0.0, 1e-300, 0.5, 1.0]),
            top_k=st.sampled_from([0, 1, 7, 1_000_000]),
            min_p=st.sampled_from([0.0, 5e-324, 1.0]),
            repetition_penalty=st.sampled_from([5e-324, 1e-6, 1.0, 10.0]),
            presence_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
            frequency_penalty=st.sampled_from([-2.0, 0.0, 2.0]),
            logit_bias=st.dictionaries(st.integers(0, 2**31 - 1) | st.integers(0, 400), st.sampled_from([-100, 100.0])),
            stop=st.lists(st.sampled_from(["", "l", "lo", "🌶️", "\ufffd", "Hel"]), max_size=3).map(tuple),
            stop_token_ids=st.frozensets(st.integers(0, 400), max_size=2),
            logprobs=st.none() | st.integers(0, 20),
            n=st.integers(1, 4),
        ),
        min_size=1,
        max_size=6,
    ),
    st.integers(0, 8),
)
def test_whatever_is_asked_each_request_ends_once_and_counts_right(asked: list[SamplingParams], abort_at: int) -> None:
    core = scripted_core(ScriptedModel("Hello 🌶️", block_size=4), max_context=32, prefill_chunk=4)
    readers = [Reader() for _ in asked]
    active = [
        core.add(request(str(place), "prompt 🌶️", sampling), reader.events.append)
        for place, (sampling, reader) in enumerate(zip(asked, readers, strict=True))
    ]
    for _ in range(abort_at):
        core.step()
    if active[0] is not None:
        core.abort(active[0])
    run(core)
    for sampling, reader in zip(asked, readers, strict=True):
        chunks = [event for event in reader.events if isinstance(event, TokenChunk)]
        assert reader.finished.usage.completion_tokens == reader.num_tokens()
        assert [end.index for end in reader.finished.choices] == list(range(sampling.n))
        assert all((chunk.logprobs is None) == (sampling.logprobs is None) for chunk in chunks)
        assert not any(text in reader.text(index) for text in sampling.stop if text for index in range(sampling.n))
