from __future__ import annotations

import pytest

from workers.intent.dataset import Row
from workers.intent.evaluate import accuracy, expected_calibration_error, macro_f1, precision_recall, render, report


def test_metrics_of_a_small_case_by_hand() -> None:
    expected, predicted = ["a", "a", "b", "out_of_scope"], ["a", "b", "b", "out_of_scope"]
    assert accuracy(expected, predicted) == 0.75
    assert precision_recall(expected, predicted, "b") == (0.5, 1.0)
    assert macro_f1(expected, predicted) == pytest.approx((2 / 3 + 2 / 3 + 1) / 3)


def test_calibration_error_is_the_gap_of_confidence_and_accuracy() -> None:
    assert expected_calibration_error([0.95, 0.95], [True, False]) == pytest.approx(0.45)
    assert expected_calibration_error([1.0, 1.0], [True, True]) == 0
    assert expected_calibration_error([], []) == 0


def test_a_report_has_a_part_for_each_language() -> None:
    rows = [Row(text="hi", intent="a"), Row(text="你好", intent="a", language="zh")]
    found = report(rows, ["a", "b"], [1.0, 0.5])
    assert found["accuracy"] == 0.5
    assert found["languages"]["en"]["accuracy"] == 1.0
    assert found["languages"]["zh"]["accuracy"] == 0.0
    assert "zh" in render(found)
