from __future__ import annotations

import pytest

from workers.generation.engine.pace import Pace


def test_nothing_is_known_before_the_first_step() -> None:
    assert (Pace().step_ms, Pace().tokens_per_s) == (0.0, 0.0)


def test_the_first_step_counts_whole_and_later_ones_a_little() -> None:
    pace = Pace()
    pace.note(100.0, 4)
    assert (pace.step_ms, pace.tokens_per_s) == (100.0, 40.0)
    pace.note(200.0, 4)
    assert pace.step_ms == pytest.approx(110.0)


def test_a_change_of_speed_is_followed_and_one_slow_step_is_not() -> None:
    pace = Pace()
    for _ in range(50):
        pace.note(10.0, 8)
    pace.note(1_000.0, 8)
    assert pace.step_ms < 120
    for _ in range(100):
        pace.note(20.0, 8)
    assert pace.step_ms == pytest.approx(20, rel=0.01)
    assert pace.tokens_per_s == pytest.approx(400, rel=0.01)


def test_tokens_per_second_weigh_steps_by_their_time() -> None:
    """A long step that draws nothing (it reads a prompt) takes its share of the time."""
    pace = Pace()
    for _ in range(100):
        pace.note(90.0, 0)
        pace.note(10.0, 10)
    assert pace.tokens_per_s == pytest.approx(100, rel=0.15)
