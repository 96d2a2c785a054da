"""Guesses by look-up: right where text repeats itself, silent where it does not, and never seen in an answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.tokens import FinishReason
from tests.workers.generation.engine.readers import GREEDY, Reader, answer, request, run
from tests.workers.generation.fakes import ContextModel, PagedModel, ScriptedModel, scripted_core
from workers.generation.engine.protocol import SamplingParams
from workers.generation.engine.scheduler import DOUBLING_ROWS
from workers.generation.engine.settings import Preemption
from workers.generation.engine.speculation import SIZES, PromptLookup

TEXT = "the quick brown fox jumps over the lazy dog. "


def test_what_followed_the_last_tokens_before_is_proposed() -> None:
    lookup = PromptLookup()
    assert lookup.propose(b"the quick fox; the ", 5) == list(b"quick")
    assert lookup.propose(b"the quick fox; the q", 3) == list(b"uic")
    assert lookup.propose(b"the quick fox; the qa", 3) == []


def test_the_longer_match_wins_and_of_equal_ones_the_latest() -> None:
    assert PromptLookup().propose(b"abcX bcY abc", 1) == list(b"X")
    assert PromptLookup().propose(b"abcX abcY abc", 1) == list(b"Y")


def test_a_loop_is_guessed_beyond_its_last_token() -> None:
    assert PromptLookup().propose(b"xababab", 7) == list(b"abababa")
    assert PromptLookup().propose(b"aaaa", 5) == list(b"aaaaa")


@pytest.mark.parametrize("tokens", [b"", b"a", b"ab", b"abc", b"abcdefgh"])
def test_new_text_is_not_guessed(tokens: bytes) -> None:
    assert PromptLookup().propose(tokens, 8) == []


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 9), st.lists(st.integers(0, 60), max_size=4))
def test_the_index_that_grows_proposes_what_one_over_all_tokens_does(
    tokens: list[int], max_draft: int, stops: list[int]
) -> None:
    grown = PromptLookup()
    for stop in sorted(stops):
        grown.propose(tokens[:stop], max_draft)
    found = grown.propose(tokens, max_draft)
    assert found == PromptLookup().propose(tokens, max_draft)
    assert found == searched(tokens, max_draft)


def searched(tokens: list[int], count: int) -> list[int]:
    """The same by a search from the end."""
    for size in SIZES:
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                grown = list(tokens)
                for place in range(count):
                    grown.append(grown[start + size + place])
                return grown[len(tokens) :]
    return []


CHEAP = 0.05  # tokens that one more row costs in a small batch


def test_useless_guesses_pause_for_longer_and_longer() -> None:
    lookup, pauses, since = PromptLookup(), [], 0
    for num_tokens in range(1, 600):
        if lookup.num_wanted(num_tokens, 8, CHEAP):
            pauses += [since] if since else []
            since = 0
            lookup.record(num_tokens, 2, 0)
        else:
            since += 1
    assert pauses == sorted(pauses)
    assert pauses[0] < 10 and pauses[-1] > 100


def test_after_success_more_is_guessed_and_after_failure_less() -> None:
    lookup = PromptLookup()
    wanted = [lookup.num_wanted(1, 8, CHEAP)]
    for num_accepted in (8, 8, 8, 0, 0, 0, 0):
        lookup.record(1, 8, num_accepted)
        wanted.append(lookup.num_wanted(1, 8, CHEAP))
    assert wanted[0] < wanted[3] == 8 > wanted[-1] > 0


def test_a_row_that_costs_much_is_only_spent_on_sure_guesses() -> None:
    lookup = PromptLookup()
    found = [lookup.num_wanted(1, 8, cost) for cost in (0.01, 0.05, 0.2, 0.5, 0.7)]
    assert found == sorted(found, reverse=True)
    assert (found[0], found[-1]) == (8, 0)
    for _ in range(30):
        lookup.record(1, 8, 8)
    assert lookup.num_wanted(1, 8, 0.7) == 8


def test_who_is_not_tried_is_trusted_again_after_a_while() -> None:
    lookup, num_steps = PromptLookup(), 0
    for _ in range(4):
        lookup.record(1, 8, 0)
    while not lookup.num_wanted(1, 8, 0.3):
        lookup.pass_over()
        num_steps += 1
    assert 10 < num_steps < 60


def steps_of(model: PagedModel, sampling: SamplingParams = GREEDY, **limits: object) -> tuple[Reader, int]:
    core = scripted_core(model, **{"max_draft": 8, **limits})  # type: ignore[arg-type]
    return answer(core, request(prompt=TEXT, sampling=sampling)), model.num_steps


def test_an_answer_that_quotes_its_prompt_takes_a_fraction_of_the_steps() -> None:
    quote = TEXT + "the end"
    without, num_steps = steps_of(ScriptedModel(quote, num_prompt=len(TEXT)), max_draft=0)
    reader, num_fewer = steps_of(ScriptedModel(quote, num_prompt=len(TEXT)))
    assert reader.text() == without.text() == quote
    assert num_fewer < num_steps / 3


def test_what_was_guessed_and_what_was_right_is_counted() -> None:
    model = ScriptedModel(TEXT, num_prompt=len(TEXT))
    core = scripted_core(model, max_draft=4)
    reader = answer(core, request(prompt=TEXT))
    statistics = core.statistics()
    rows = sum(logits for batch in model.batches for _, _, logits in batch)
    assert statistics.num_draft_tokens == rows - model.num_steps + 2  # the prompt's chunks but for the last draw none
    assert statistics.num_generation_tokens == reader.num_tokens()
    assert 0 < statistics.num_accepted_tokens <= statistics.num_draft_tokens
    assert model.num_steps == 3 - 1 + reader.num_tokens() - statistics.num_accepted_tokens


@pytest.mark.parametrize("max_tokens", range(1, 14))
def test_a_limit_in_mid_draft_is_kept(max_tokens: int) -> None:
    sampling = replace(GREEDY, max_tokens=max_tokens)
    reader, _ = steps_of(ScriptedModel(TEXT, num_prompt=len(TEXT)), sampling)
    assert reader.text() == TEXT[:max_tokens]
    assert reader.finished.choices[0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(
    "sampling",
    [
        replace(GREEDY, stop=("brown",)),
        replace(GREEDY, stop_token_ids=frozenset(b"z")),
        replace(GREEDY, repetition_penalty=1.3, logprobs=2),
        replace(GREEDY, temperature=1.0, presence_penalty=0.7, frequency_penalty=0.2, n=3, seed=3),
        replace(GREEDY, temperature=0.8, top_p=0.9, n=2, logprobs=0, seed=9),
    ],
)
def test_guesses_change_no_event(sampling: SamplingParams) -> None:
    plain, _ = steps_of(ContextModel("ab"), sampling, max_draft=0)
    for limits in ({}, {"max_draft": 2}, {"max_speculative_rows": 5}):
        guessed, _ = steps_of(ContextModel("ab"), sampling, **limits)
        for index in range(sampling.n):
            own = [event for event in guessed.events[:-1] if event.index == index]  # type: ignore[union-attr]
            assert own == [event for event in plain.events[:-1] if event.index == index]  # type: ignore[union-attr]
        assert guessed.finished.choices == plain.finished.choices


def test_a_full_batch_is_not_guessed_ahead() -> None:
    model = ScriptedModel(TEXT, num_prompt=len(TEXT))
    core = scripted_core(model, num_slots=8, max_draft=8, max_speculative_rows=6)
    readers = [Reader() for _ in range(8)]
    for place, reader in enumerate(readers):
        core.add(request(str(place), TEXT), reader.events.append)
    for _ in range(20):
        core.step()
    assert max(sum(tokens for _, tokens, _ in batch) for batch in model.batches[4:]) <= 8
    run(core)
    assert [reader.text() for reader in readers] == [TEXT] * 8


@pytest.mark.parametrize("num_fewer", [0, 1, 2])
@pytest.mark.parametrize("max_rows", [32, 1_000])
def test_a_guess_that_is_right_every_second_time_pays_until_the_rows_double_a_step(
    num_fewer: int, max_rows: int
) -> None:
    model = ScriptedModel(TEXT, num_prompt=len(TEXT), num_blocks=200)
    core = scripted_core(model, num_slots=DOUBLING_ROWS, max_draft=8, max_speculative_rows=max_rows)
    readers = [Reader() for _ in range(DOUBLING_ROWS - num_fewer)]
    added = [core.add(request(str(place), TEXT), reader.events.append) for place, reader in enumerate(readers)]
    sequences = [sequence for active in added if active is not None for sequence in active.sequences]

    def step(share: float) -> int:
        for sequence in sequences:
            sequence.lookup.share = share
        core.step()
        return sum(tokens for _, tokens, _ in model.batches[-1])

    while min(reader.num_tokens() for reader in readers) < 4:
        step(share=0)
    assert step(share=0) == len(readers)
    assert step(share=0.5) == DOUBLING_ROWS


def test_nobody_is_preempted_for_a_guess() -> None:
    model = ScriptedModel(TEXT, num_prompt=len(TEXT), num_blocks=23, block_size=4)
    core = scripted_core(model, max_draft=8)
    reader = answer(core, request(prompt=TEXT, sampling=replace(GREEDY, max_tokens=46)))
    assert reader.text() == TEXT
    assert core.statistics().num_preemptions == 0


@pytest.mark.parametrize("preemption", Preemption)
def test_abort_in_the_middle_of_guesses_frees_everything(preemption: Preemption) -> None:
    for num_steps in range(1, 12):
        model = ScriptedModel(TEXT, num_prompt=len(TEXT), num_blocks=16, block_size=8)
        core = scripted_core(model, max_draft=8, preemption=preemption, swap_blocks=100)
        readers = [Reader() for _ in range(3)]
        active = [core.add(request(str(place), TEXT), reader.events.append) for place, reader in enumerate(readers)]
        for _ in range(num_steps):
            core.step()
        assert active[0] is not None and active[2] is not None
        core.abort(active[0])
        core.abort(active[2])
        run(core)
        assert readers[1].text() == TEXT
        assert readers[0].text() == TEXT[: len(readers[0].text())]
