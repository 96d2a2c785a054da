"""What results say: better is above one, targets are met by what was measured alone, and the worst is shown."""

from __future__ import annotations

from typing import Any

import pytest

from ops.bench.engine.summary import claims, ratios, targets
from tests.ops.bench.engine.results import result

PEER = "transformers_generate"


def test_ratios_are_above_one_where_ours_is_better() -> None:
    theirs = result(PEER, "fp32", tokens_per_s=25.0, latency=1_000.0, ttft_ms={"p50": 30.0, "p99": 30.0})
    theirs |= {"peak_model_mb": 600.0, "serving_model_mb": 500.0}
    (ratio,) = ratios([result(), theirs])
    assert (ratio["against"], ratio["against_precision"], ratio["precision"]) == (PEER, "fp32", "int8")
    assert (ratio["tokens_per_s"], ratio["ttft_p50"], ratio["mean_latency"]) == (4.0, 3.0, 2.5)
    assert (ratio["less_latency"], ratio["less_memory"], ratio["less_serving_memory"]) == (60.0, 50.0, 50.0)


def test_only_equal_cells_compare_and_what_was_skipped_does_not() -> None:
    other = result(PEER, "fp32", concurrency=1)
    skipped = {key: result(PEER)[key] for key in ("engine", "precision", "workload", "profile", "concurrency")}
    assert ratios([result(), other, skipped | {"skipped": "too long"}]) == []


@pytest.mark.parametrize(("rate", "met"), [(801.0, True), (799.0, False)])
def test_a_target_is_met_from_its_ratio_on(rate: float, met: bool) -> None:
    ours = result(tokens_per_s=rate, concurrency=32)
    batch = result("transformers_generate_batch", "fp32", concurrency=32)
    (row,) = [
        each for each in targets([ours, batch], []) if each["target"].startswith("tokens/s at 32, plain, by transf")
    ]
    assert (row["least"], row["met"]) == (8.0, met)
    assert row["ours"] == pytest.approx(rate / 100, abs=0.005)


def test_targets_are_judged_against_the_best_number_format_of_the_peer() -> None:
    rows = targets(
        [
            result(tokens_per_s=150.0),
            result("llama_cpp", "q8_0", tokens_per_s=50.0),
            result("llama_cpp", "q4_1", tokens_per_s=100.0),
        ],
        [],
    )
    (row,) = [each for each in rows if each["target"].startswith("tokens/s at 8")]
    assert (row["against"], row["ours"], row["met"]) == ("llama_cpp q4_1", 1.5, True)


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    rows = targets([], [])
    assert rows
    assert {(each["ours"], each["met"]) for each in rows} == {(None, None)}


def test_a_figure_that_is_only_to_be_stated_has_no_verdict() -> None:
    rows = targets([result(concurrency=1), result("llama_cpp", "q4_1", concurrency=1)], [])
    (row,) = [each for each in rows if each["target"].startswith("tokens/s at 1, plain")]
    assert (row["ours"], row["least"], row["met"]) == (1.0, None, None)


def test_the_worst_figure_against_transformers_decides_whether_we_are_never_slower() -> None:
    slow = result(PEER, "fp32", concurrency=1, itl_ms={"p50": 4.0, "p99": 4.0})
    rows = targets([result(), result(concurrency=1), result(PEER, "fp32"), slow], [])
    (row,) = [each for each in rows if "never slower" in each["target"]]
    assert "itl p50" in row["target"]
    assert (row["ours"], row["met"], row["cell"]) == (0.8, False, "plain, short, 1 at once")


def test_a_prompt_alone_counts_by_the_time_to_its_first_token() -> None:
    alone: dict[str, Any] = {"profile": "512/1", "concurrency": 1}
    theirs = result(PEER, "fp32", ttft_ms={"p50": 12.5, "p99": 13.0}, **alone)
    (row,) = [each for each in targets([], [result(**alone), theirs]) if "512 tokens" in each["target"]]
    assert (row["ours"], row["least"], row["met"]) == (1.25, 1.2, True)


def test_claims_stand_beside_the_references() -> None:
    wide = result(precision="fp32", tokens_per_s=50.0) | {"serving_model_mb": 500.0}
    serial = result(latency=1_000.0)
    found = {each["claim"]: each for each in claims([result(), wide], [serial])}
    assert {each["reference"] for each in found.values()} == {62.0, 80.0, 1.76, 43.0}
    assert found["a batch of 8 cuts mean latency, int8"]["ours"] == 60.0
    assert found["streaming cuts the time to the first text, int8, short, 8 at once"]["ours"] == 97.5
    assert found["int8 is faster than fp32, short, 8 at once"]["ours"] == 2.0
    assert found["int8 needs less memory than fp32, short, 8 at once"]["ours"] == 50.0
