"""How good a classifier is: metrics as pure functions, and their report over rows with known intents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from schemas.intent import IntentResult
from workers.intent.dataset import Row
from workers.intent.head import OUT_OF_SCOPE

NUM_BINS = 10
_BATCH_SIZE = 64

Report = dict[str, Any]


class Classifier(Protocol):
    """What is evaluated: `workers.intent.classifier.IntentClassifier`, or anything like it."""

    def classify(self, texts: Sequence[str]) -> Sequence[IntentResult]:
        """Return one result per text, in order."""
        ...


def evaluate(rows: Sequence[Row], classifier: Classifier) -> Report:
    """Classify all rows and return their report. Blocking."""
    results: list[IntentResult] = []
    for start in range(0, len(rows), _BATCH_SIZE):
        results += classifier.classify([row.text for row in rows[start : start + _BATCH_SIZE]])
    return report(rows, [result.intent for result in results], [result.confidence for result in results])


def report(rows: Sequence[Row], predicted: Sequence[str], confidences: Sequence[float]) -> Report:
    """Return the metrics over all rows, and per language of the rows under `languages`."""
    languages = sorted({row.language for row in rows})
    parts = {language: [place for place, row in enumerate(rows) if row.language == language] for language in languages}
    return _metrics([row.intent for row in rows], predicted, confidences) | {
        "languages": {
            language: _metrics(
                [rows[place].intent for place in places],
                [predicted[place] for place in places],
                [confidences[place] for place in places],
            )
            for language, places in parts.items()
        }
    }


def _metrics(expected: Sequence[str], predicted: Sequence[str], confidences: Sequence[float]) -> Report:
    is_right = [want == got for want, got in zip(expected, predicted, strict=True)]
    precision, recall = precision_recall(expected, predicted, OUT_OF_SCOPE)
    values = {
        "accuracy": accuracy(expected, predicted),
        "macro_f1": macro_f1(expected, predicted),
        "out_of_scope_precision": precision,
        "out_of_scope_recall": recall,
        "ece": expected_calibration_error(confidences, is_right),
    }
    return {"rows": len(expected)} | {name: round(value, 4) for name, value in values.items()}


def accuracy(expected: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the share of equal pairs, 0 for none."""
    return sum(want == got for want, got in zip(expected, predicted, strict=True)) / max(len(expected), 1)


def precision_recall(expected: Sequence[str], predicted: Sequence[str], label: str) -> tuple[float, float]:
    """Return precision and recall of one label; 0 where nothing was predicted or nothing was to be found."""
    num_hits = sum(want == got == label for want, got in zip(expected, predicted, strict=True))
    num_predicted, num_expected = list(predicted).count(label), list(expected).count(label)
    return num_hits / max(num_predicted, 1), num_hits / max(num_expected, 1)


def macro_f1(expected: Sequence[str], predicted: Sequence[str]) -> float:
    """Return the mean F1 of the labels that occur in `expected`."""
    scores = []
    for label in sorted(set(expected)):
        precision, recall = precision_recall(expected, predicted, label)
        scores.append(2 * precision * recall / (precision + recall) if precision + recall else 0.0)
    return sum(scores) / max(len(scores), 1)


def expected_calibration_error(
    confidences: Sequence[float], is_right: Sequence[bool], num_bins: int = NUM_BINS
) -> float:
    """Return the mean distance of confidence and accuracy over bins of equal width (Guo et al. 2017)."""
    if not confidences:
        return 0.0
    values, hits = np.asarray(confidences, dtype=np.float64), np.asarray(is_right, dtype=np.float64)
    bins = np.minimum((values * num_bins).astype(int), num_bins - 1)
    gaps = [
        abs(values[bins == place].mean() - hits[bins == place].mean()) * (bins == place).mean()
        for place in np.unique(bins)
    ]
    return float(sum(gaps))


def render(found: Report) -> str:
    """Return a report as a table of text, one line per language and one for all."""
    lines = [f"{'':8}{'rows':>6}{'accuracy':>10}{'macro F1':>10}{'oos prec':>10}{'oos rec':>9}{'ECE':>8}"]
    for name, row in [*found["languages"].items(), ("all", found)]:
        lines.append(
            f"{name:8}{row['rows']:>6}{row['accuracy']:>10.4f}{row['macro_f1']:>10.4f}"
            f"{row['out_of_scope_precision']:>10.4f}{row['out_of_scope_recall']:>9.4f}{row['ece']:>8.4f}"
        )
    return "\n".join(lines)
