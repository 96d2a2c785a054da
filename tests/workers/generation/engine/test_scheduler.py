"""Who runs in a step, with how many tokens: decodes first, prompts in chunks, everybody in turn."""

from __future__ import annotations

from dataclasses import replace

import pytest

from schemas.errors import PromptTooLongError
from tests.workers.generation.engine.readers import GREEDY, Reader, answer, request, run
from tests.workers.generation.fakes import PagedModel, ScriptedModel, scripted_core
from workers.generation.engine.admission import check_request
from workers.generation.engine.protocol import EngineRequest
from workers.generation.engine.token_budget import RECOVERY_STEPS, TokenBudget


def chunks_of(model: PagedModel) -> list[int]:
    """Return how many tokens each step has run, of a core with one request."""
    return [sum(tokens for _, tokens, _ in batch) for batch in model.batches]


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        *((length, [length]) for length in (1, 2, 3, 4, 15, 16)),
        (17, [16, 1]),
        (64, [16, 16, 16, 16]),
        (255, [63, 63, 63, 63, 3]),
        (256, [64, 64, 64, 64]),
        (257, [64, 64, 64, 64, 1]),
        (1_023, [255, 255, 255, 255, 3]),
        (1_024, [256, 256, 256, 256]),
        (1_025, [256, 256, 256, 256, 1]),
        (2_000, [256] * 7 + [208]),
    ],
)
def test_a_prompt_is_read_in_quarters_of_a_block_to_256_tokens(length: int, expected: list[int]) -> None:
    model = ScriptedModel("Hi", num_prompt=length)
    core = scripted_core(model, max_context=2_048, prefill_chunk=256)
    reader = answer(core, request(prompt="x" * length))
    assert reader.text() == "Hi"
    assert chunks_of(model)[: len(expected)] == expected
    assert [logits for batch in model.batches for _, _, logits in batch] == [0] * (len(expected) - 1) + [1] * 3


def test_several_prompts_are_read_in_one_step_within_the_budget() -> None:
    model = ScriptedModel("Hello.", num_prompt=40)
    core = scripted_core(model, max_batched_tokens=40)
    for name in "abcd":
        core.add(request(name, name * 40), Reader().events.append)
    core.step()
    assert model.batches[0] == [(0, 16, 0), (0, 16, 0), (0, 8, 0)]
    run(core)
    assert max(chunks_of(model)) == 40


def test_decodes_come_before_chunks_and_neither_starves() -> None:
    model = ScriptedModel("x" * 60, num_prompt=3)
    core = scripted_core(model, num_slots=8, max_batched_tokens=6)
    readers = [Reader() for _ in range(7)]
    for place, reader in enumerate(readers[:6]):
        core.add(request(str(place), "abc"), reader.events.append)
    for _ in range(6):
        core.step()
    core.add(request("late", "abc" + "y" * 30), readers[6].events.append)
    before = [reader.num_tokens() for reader in readers]
    for _ in range(22):
        core.step()
    assert all(found.num_tokens() > count for found, count in zip(readers, before, strict=True))
    gained = [found.num_tokens() - count for found, count in zip(readers[:6], before[:6], strict=True)]
    assert max(gained) - min(gained) <= 1  # in turn
    assert max(chunks_of(model)) <= 6


def test_the_lowest_priority_runs_first_and_equal_ones_in_their_order() -> None:
    core = scripted_core(ScriptedModel("ab"), num_slots=1)
    order: list[str] = []
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        asked = replace(request(name), priority=priority)
        core.add(asked, lambda event, name=name: order.append(name))  # type: ignore[misc]
    run(core)
    assert list(dict.fromkeys(order)) == list("dbac")


def test_choices_count_as_sequences_and_all_begin_together() -> None:
    core = scripted_core(ScriptedModel("ab"), num_slots=3)
    for name, n in (("a", 2), ("b", 2), ("c", 1)):
        core.add(request(name, sampling=replace(GREEDY, n=n)), Reader().events.append)
    core.step()
    assert (core.scheduler.num_running, core.scheduler.num_waiting) == (1, 2)  # c does not overtake b
    run(core)


def test_a_prefix_is_shared_but_for_the_last_token_and_only_under_its_salt() -> None:
    model = ScriptedModel("Hello.", num_prompt=32)
    core = scripted_core(model)
    found = []
    for salt in ("", "", "tenant", "tenant", "other"):
        asked = replace(request(prompt="x" * 32), cache_salt=salt)
        found.append(answer(core, asked).finished.usage.cached_tokens)
    assert found == [0, 16, 0, 16, 0]
    statistics = core.statistics()
    assert (statistics.prefix_queries, statistics.prefix_hits) == (160, 32)
    assert statistics.prefix_hit_rate == 0.2


def test_the_next_turn_of_a_session_finds_the_answer_of_the_last() -> None:
    model = ScriptedModel("y" * 40)
    core = scripted_core(model)
    first = answer(core, request(prompt="x" * 20))
    assert first.num_tokens() == 41
    turn = EngineRequest(request_id="r", prompt=(*b"x" * 20, *first.token_ids(), *b"and"), sampling=GREEDY)
    assert answer(core, turn).finished.usage.cached_tokens == 48  # of 60 that were read


def test_only_the_tail_of_a_fork_is_copied() -> None:
    model = ScriptedModel("abcdefgh", peak=1.0, num_prompt=10)
    copies: list[tuple[int, int]] = []
    copy_block = model.copy_block
    model.copy_block = lambda source, target: (copies.append((source, target)), copy_block(source, target))[1]  # type: ignore[method-assign, func-returns-value]
    core = scripted_core(model)
    sampling = replace(GREEDY, n=3, temperature=1.0, max_tokens=20)
    core.add(request(prompt="0123456789", sampling=sampling), Reader().events.append)
    run(core)
    assert copies == [(0, 1), (0, 2)]  # the last one keeps the block


def test_admission_leaves_room_for_those_that_run_to_grow() -> None:
    model = ScriptedModel("y" * 30, num_blocks=12, block_size=4, num_prompt=16)
    core = scripted_core(model)
    for name in "abc":
        core.add(request(name, name * 16), Reader().events.append)
    core.step()
    assert core.scheduler.num_running == 2  # twelve blocks hold three prompts, and not one token more
    run(core)


def test_request_that_can_never_fit_the_pool_is_refused_and_the_longest_that_fits_is_answered() -> None:
    model = ScriptedModel("Hello.", num_blocks=3, block_size=4)
    core = scripted_core(model)
    limits = {"vocab_size": 512, "max_context": 512, "max_sequences": 4, "layout": model.layout}
    with pytest.raises(PromptTooLongError, match="12"):
        check_request(request(prompt="x" * 12), **limits)  # type: ignore[arg-type]
    longest = request(prompt="x" * 11, sampling=replace(GREEDY, n=4))
    check_request(longest, **limits)  # type: ignore[arg-type]
    reader = answer(core, longest)
    assert [reader.text(index) for index in range(4)] == ["H"] * 4
    assert answer(core, request(prompt="Hi")).text() == "Hello."


def test_a_budget_halves_at_a_failure_and_comes_back_in_steps() -> None:
    budget = TokenBudget(64)
    budget.lower(200)
    assert budget.num_tokens == 32
    budget.lower(9)
    assert budget.num_tokens == 4
    budget.lower(1)
    assert budget.num_tokens == 2
    found = []
    for _ in range(6 * RECOVERY_STEPS):
        budget.note_success()
        found.append(budget.num_tokens)
    assert found[RECOVERY_STEPS - 2 :: RECOVERY_STEPS] == [2, 4, 8, 16, 32, 64]
    assert budget.num_tokens == 64


def test_scheduling_needs_no_model() -> None:
    core = scripted_core(ScriptedModel("Hello.", num_prompt=40))
    core.add(request(prompt="x" * 40), Reader().events.append)
    plan = core.scheduler.schedule(now_s=5.0)
    assert [(item.start, item.end, item.num_logits) for item in plan.scheduled] == [(0, 16, 0)]
