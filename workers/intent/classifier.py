"""Texts to intents, with the head's probabilities and its right to say "none of these".

The decision (`decide`) is pure: probabilities, nearest centroid and calibration in, intent and confidence out.
A text is out of scope if that class wins, if no intent is likely enough, if it is far from all that was trained on,
or if the head has never seen its script.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from schemas.intent import IntentResult
from workers.intent.complexity import complexity
from workers.intent.features import Matrix, SentenceEncoder, text_features
from workers.intent.head import DEFAULT_FOLDER, OUT_OF_SCOPE, Calibration, Head, Provenance, load_head
from workers.intent.language import detect_language, resolve_language

NUM_ALTERNATIVES = 3
_MIN_ALTERNATIVE = 0.001


class IntentClassifier:
    """An encoder with a head on it. Blocking; thread-safe, as the encoder is."""

    def __init__(self, encoder: SentenceEncoder, head: Head) -> None:
        """Take both; neither is closed here."""
        self._encoder = encoder
        self._head = head

    @classmethod
    def load(cls, encoder: SentenceEncoder, folder: Path | None = None) -> IntentClassifier:
        """Load the head from `folder`, or the one that ships with GEA. Raises ConfigError if it does not fit."""
        return cls(encoder, load_head(folder or DEFAULT_FOLDER, encoder))

    @property
    def model(self) -> str:
        """Return name and hash of the head's weights."""
        return self._head.name

    @property
    def labels(self) -> tuple[str, ...]:
        """Return the intents that the head knows."""
        return self._head.metadata.labels

    @property
    def provenance(self) -> Provenance | None:
        """Return where the head comes from."""
        return self._head.metadata.provenance

    def classify(self, texts: Sequence[str], languages: Sequence[str | None] | None = None) -> list[IntentResult]:
        """Return one result per text, in order; `languages` are those that clients have stated.

        `needs_retrieval` is left at its default and `took_ms` is the time of the whole batch.
        """
        if not texts:
            return []
        started = time.perf_counter()
        features = text_features(texts, self._encoder)  # (N, F)
        logits = self._head.logits(features)  # (N, K)
        similarities = self._head.similarity(features)  # (N,)
        decisions = [
            self._decide(text, scores, float(similarity))
            for text, scores, similarity in zip(texts, logits, similarities, strict=True)
        ]
        took_ms = (time.perf_counter() - started) * 1000
        return [
            IntentResult(
                intent=intent,
                confidence=confidence,
                complexity=complexity(text),
                language=resolve_language(requested, text),
                alternatives=alternatives,
                model=self.model,
                took_ms=took_ms,
            )
            for text, requested, (intent, confidence, alternatives) in zip(
                texts, languages or [None] * len(texts), decisions, strict=True
            )
        ]

    def _decide(self, text: str, logits: Matrix, similarity: float) -> tuple[str, float, dict[str, float]]:
        calibration = self._head.metadata.calibration.get(detect_language(text))
        if calibration is None:
            return OUT_OF_SCOPE, 1.0, {}
        probabilities = softmax(logits[None], calibration.temperature)[0]
        return decide(self.labels, probabilities, similarity, calibration)


def decide(
    labels: Sequence[str], probabilities: Matrix, similarity: float, calibration: Calibration
) -> tuple[str, float, dict[str, float]]:
    """Return intent, confidence and the next likely intents of one text.

    The confidence of `out_of_scope` is the probability that the best intent is wrong.
    """
    ranked = {labels[place]: float(probabilities[place]) for place in np.argsort(-probabilities, kind="stable")}
    scope = {label: value for label, value in ranked.items() if label != OUT_OF_SCOPE}
    best = next(iter(scope))
    is_unlikely = scope[best] < max(calibration.min_confidence, ranked.get(OUT_OF_SCOPE, 0.0))
    if is_unlikely or similarity < calibration.min_similarity:
        return OUT_OF_SCOPE, 1.0 - scope[best], _first(scope)
    return best, scope[best], _first({label: value for label, value in ranked.items() if label != best})


def softmax(logits: Matrix, temperature: float) -> Matrix:
    """Return the probabilities of (N, K) scores at a temperature."""
    scaled = (logits - logits.max(axis=1, keepdims=True)) / temperature
    exponents = np.exp(scaled)
    probabilities: Matrix = exponents / exponents.sum(axis=1, keepdims=True)
    return probabilities


def _first(ranked: dict[str, float]) -> dict[str, float]:
    likely = [(label, round(value, 4)) for label, value in ranked.items() if value >= _MIN_ALTERNATIVE]
    return dict(likely[:NUM_ALTERNATIVES])
