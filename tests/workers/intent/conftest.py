"""An encoder without weights, for the intent tests."""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from workers.intent.dataset import Row
from workers.intent.head import Head
from workers.intent.train import train


class WordEncoder:
    """The sum of one random direction per word, at length 1."""

    identity = "words@0001"
    dimension = 32

    def encode(self, texts: Sequence[str]) -> NDArray[np.float32]:
        vectors = np.stack([sum(map(_direction, text.lower().split()), np.zeros(self.dimension)) for text in texts])
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: NDArray[np.float32] = (vectors / np.maximum(lengths, 1e-9)).astype(np.float32)
        return unit


def _direction(word: str) -> NDArray[np.float64]:
    direction: NDArray[np.float64] = np.random.default_rng(zlib.crc32(word.encode("utf-8", "replace"))).normal(
        size=WordEncoder.dimension
    )
    return direction


_TEXTS = {
    "returns": ("return shoes", "send the shoes back", "return my order", "give back boots", "return boots"),
    "greeting": ("hello", "hello there", "good morning", "hi there", "hi good evening"),
    "out_of_scope": ("stock price", "weather today", "cook pasta", "price of gold", "weather in rome"),
}


@pytest.fixture(scope="session")
def encoder() -> WordEncoder:
    return WordEncoder()


@pytest.fixture(scope="session")
def rows() -> list[Row]:
    return [
        Row(text=f"{text} {tail}".strip(), intent=intent)
        for intent, texts in _TEXTS.items()
        for text in texts
        for tail in ("", "please")
    ]


@pytest.fixture(scope="session")
def head(rows: list[Row], encoder: WordEncoder) -> Head:
    return train(rows, encoder, l2_choices=(1e-4,))[0]
