"""What the engine says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.workers.generation.engine.readers import GREEDY, Reader, answer, request, run
from tests.workers.generation.fakes import ScriptedModel, scripted_core
from workers.generation.engine.sequence import repetition_ratio
from workers.generation.engine.statistics import EngineStatistics


def test_an_engine_that_has_done_nothing_says_so() -> None:
    statistics = scripted_core(ScriptedModel(num_blocks=8)).statistics()
    assert statistics == EngineStatistics(total_blocks=8)


def test_running_requests_show_in_blocks_and_tokens() -> None:
    core = scripted_core(ScriptedModel("Hello.", num_prompt=17), num_slots=2)
    for name in "abc":
        core.add(request(name, name * 17), Reader().events.append)
    core.step()
    core.step()
    found = core.statistics()
    assert (found.running, found.waiting, found.batch_size, found.num_steps) == (2, 1, 2, 2)
    assert (found.tokens_in_flight, found.active_blocks, found.num_prompt_tokens) == (34, 4, 34)
    assert found.fragmentation == pytest.approx(1 - 34 / 64)
    assert found.num_generation_tokens == 2
    assert found.last_step_ms > 0 and found.step_ms > 0 and found.tokens_per_s > 0
    run(core)
    ended = core.statistics()
    assert (ended.running, ended.waiting, ended.active_blocks, ended.tokens_in_flight) == (0, 0, 0, 0)
    assert (ended.num_finished, ended.num_generation_tokens, ended.fragmentation) == (3, 21, 0.0)
    assert ended.cached_blocks == 3  # one full block of each


def test_blocks_that_are_shared_count_once() -> None:
    core = scripted_core(ScriptedModel("x" * 50, num_prompt=65))
    for _ in range(3):
        core.add(request(prompt="y" * 65), Reader().events.append)
        for _ in range(5):
            core.step()
    found = core.statistics()
    assert (found.running, found.active_blocks) == (3, 4 + 3)
    assert found.tokens_in_flight > found.active_blocks * 16
    assert found.fragmentation * found.active_blocks <= 3
    run(core)


def test_waste_is_below_one_block_for_each_sequence() -> None:
    core = scripted_core(ScriptedModel("x" * 300, num_prompt=200), num_slots=8, max_context=1_024)
    for place in range(8):
        core.add(request(str(place), chr(97 + place) * (200 + 13 * place)), Reader().events.append)
    worst = 0.0
    while core.statistics().num_generation_tokens < 800:
        core.step()
        statistics = core.statistics()
        assert statistics.fragmentation * statistics.active_blocks <= statistics.running
        if statistics.num_generation_tokens > 80:
            worst = max(worst, statistics.fragmentation)
    assert worst < 0.04


@pytest.mark.parametrize(
    ("text", "ratio"),
    [(b"", 0.0), (b"abc", 0.0), (b"abcd", 0.0), (b"aaaaa", 0.5), (b"abcdabcd", 0.2), (b"a" * 103, 0.99)],
)
def test_repetition_is_the_share_of_runs_of_four_that_came_before(text: bytes, ratio: float) -> None:
    assert repetition_ratio(list(text)) == pytest.approx(ratio)
    if text:
        found = answer(
            scripted_core(ScriptedModel(text.decode(), num_prompt=2), max_draft=8),
            request(sampling=replace(GREEDY, max_tokens=len(text))),
        )
        assert found.finished.choices[0].repetition_ratio == pytest.approx(ratio)
