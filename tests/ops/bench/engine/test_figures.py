"""Arrivals of tokens to figures: nothing is counted twice, and what was broken off is reckoned and marked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.bench.engine.figures import Arrival, RunFigures, figures_of, summed_up


def steady(first_ms: float, gap_ms: float, number: int) -> list[Arrival]:
    return [(first_ms + gap_ms * place, [7]) for place in range(number)]


def test_rates_times_and_gaps_of_a_whole_run() -> None:
    figures = figures_of([steady(100, 50, 9), steady(200, 50, 9)], 9)
    assert list(figures.ttft_ms) == [100, 200]
    assert list(figures.latency_ms) == [500, 600]
    assert set(figures.itl_ms) == {50}
    assert figures.tokens_per_s == pytest.approx(18 / 0.6)
    assert figures.decode_tokens_per_s == pytest.approx(14 / 0.4)  # 6 and 8 tokens after both had their first
    assert not figures.is_reckoned


def test_tokens_that_come_together_are_one_gap_and_count_each() -> None:
    figures = figures_of([[(100, [1]), (200, [2, 3, 4]), (300, [5])]], 5)
    assert list(figures.itl_ms) == [100, 100]
    assert figures.decode_tokens_per_s == pytest.approx(4 / 0.2)
    assert figures.tokens_per_s == pytest.approx(5 / 0.3)


def test_a_run_that_was_broken_off_goes_on_at_the_pace_of_its_decoding() -> None:
    whole = figures_of([steady(1_000, 100, 101)], 101)
    part = figures_of([steady(1_000, 100, 11)], 101)
    assert part.is_reckoned
    assert part.num_measured_tokens == 11
    assert part.tokens_per_s == pytest.approx(whole.tokens_per_s)
    assert part.latency_ms == pytest.approx(whole.latency_ms)


def test_answers_of_one_token_have_no_gap_and_no_pace() -> None:
    figures = figures_of([[(250, [1])]], 1)
    assert (figures.itl_ms, figures.decode_tokens_per_s) == ((), 0.0)
    assert figures.tokens_per_s == pytest.approx(4.0)
    assert summed_up([figures])["itl_ms"] == {"p50": 0.0, "p99": 0.0}


@given(
    first=st.floats(1, 1e4),
    gap=st.floats(0.5, 1e3),
    wanted=st.integers(8, 64),
    read=st.integers(3, 64),
    n=st.integers(1, 8),
)
def test_reckoning_never_changes_the_figures_of_a_steady_run(
    first: float, gap: float, wanted: int, read: int, n: int
) -> None:
    whole = figures_of([steady(first, gap, wanted)] * n, wanted)
    part = figures_of([steady(first, gap, min(read, wanted))] * n, wanted)
    assert part.tokens_per_s == pytest.approx(whole.tokens_per_s, rel=1e-6)
    assert max(part.latency_ms) == pytest.approx(max(whole.latency_ms), rel=1e-6)


def run(rate: float, ttft_ms: float) -> RunFigures:
    return RunFigures(
        tokens_per_s=rate,
        decode_tokens_per_s=rate,
        ttft_ms=(ttft_ms,),
        itl_ms=(1.0,),
        latency_ms=(ttft_ms * 2,),
        num_measured_tokens=3,
        is_reckoned=False,
    )


def test_a_result_has_median_spread_and_percentiles_over_all_runs() -> None:
    found = summed_up([run(10, 5), run(30, 7), run(20, 9)])
    assert (found["tokens_per_s"], found["tokens_per_s_spread"]) == (20, [10, 30])
    assert found["ttft_ms"] == {"p50": 7, "p99": 9}
    assert found["latency_ms"] == {"mean": 14, "p50": 14, "p99": 18}
    assert (found["num_runs"], found["num_measured_tokens"]) == (3, 9)
