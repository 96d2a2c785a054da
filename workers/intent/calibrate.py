"""From scores of held-out texts to a temperature and to thresholds. Pure.

The temperature is the one with the least log loss (Guo et al. 2017). `min_similarity` is so low that only 1 % of the
texts in scope lie below it: it is there for text like nothing seen before. `min_confidence` is the value with the
greatest F1 of `out_of_scope`, the lowest of equals; without such rows, 1 % of the right answers lie below it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from workers.intent.classifier import softmax
from workers.intent.features import Matrix
from workers.intent.head import OUT_OF_SCOPE, Calibration

MAX_LOSS_IN_SCOPE = 0.01
# With fewer rows their recall says nothing.
MIN_OUT_OF_SCOPE_ROWS = 10

_TEMPERATURES = np.geomspace(0.05, 20.0, 241)


def log_loss(logits: Matrix, labels: NDArray[np.int64], temperature: float) -> float:
    """Return the mean negative log probability of the right labels: logits (N, K), labels (N,)."""
    right = softmax(logits, temperature)[np.arange(len(labels)), labels]
    return float(-np.log(np.maximum(right, 1e-12)).mean())


def fit_temperature(logits: Matrix, labels: NDArray[np.int64]) -> float:
    """Return the temperature with the least log loss."""
    return float(min(_TEMPERATURES, key=lambda temperature: log_loss(logits, labels, float(temperature))))


def fit_calibration(
    names: Sequence[str], logits: Matrix, similarities: Matrix, labels: NDArray[np.int64]
) -> Calibration:
    """Return temperature and thresholds for one language: logits (N, K), similarities (N,), labels (N,)."""
    temperature = fit_temperature(logits, labels)
    probabilities = softmax(logits, temperature)
    is_intent = np.array([name != OUT_OF_SCOPE for name in names])  # (K,)
    scoped = np.where(is_intent, probabilities, -1.0)  # (N, K)
    best, confidences = scoped.argmax(axis=1), scoped.max(axis=1)
    is_in_scope = is_intent[labels]
    min_similarity = float(np.quantile(similarities[is_in_scope], MAX_LOSS_IN_SCOPE)) if is_in_scope.any() else -1.0
    is_refused = (similarities < min_similarity) | ((probabilities * ~is_intent).max(axis=1) > confidences)
    is_right = is_in_scope & (best == labels) & ~is_refused
    return Calibration(
        temperature=round(temperature, 4),
        min_confidence=round(_min_confidence(confidences, is_right, is_refused, is_in_scope), 4),
        min_similarity=round(min_similarity, 4),
    )


def _min_confidence(
    confidences: Matrix, is_right: NDArray[np.bool_], is_refused: NDArray[np.bool_], is_in_scope: NDArray[np.bool_]
) -> float:
    if not is_right.any():
        return 0.0
    if (~is_in_scope).sum() < MIN_OUT_OF_SCOPE_ROWS:
        return float(np.quantile(confidences[is_right], MAX_LOSS_IN_SCOPE))

    def score(threshold: float) -> float:
        refused = is_refused | (confidences < threshold)
        num_hits = int((refused & ~is_in_scope).sum())
        return 2 * num_hits / max(int(refused.sum() + (~is_in_scope).sum()), 1)

    return max((0.01 * step for step in range(100)), key=score)
