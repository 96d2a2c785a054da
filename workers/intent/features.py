"""Texts to the numbers that the intent head weighs: a sentence vector beside hashed character n-grams.

The encoder knows English, so it reads the gloss of a Chinese text; n-grams carry the Chinese itself, spelling and
product words. Both blocks are unit vectors, so neither drowns the other. Hashing (Weinberger et al. 2009) needs no
vocabulary: the layout is fixed by the constants here, and `LAYOUT` names it; a head trained on another is refused.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from workers.intent.glossary import gloss

Matrix = NDArray[np.float32]

NUM_BUCKETS = 4096
LAYOUT = "gloss-sentence-vector+char-ngrams/1"

# Latin letters need 2 to 4 characters to tell words apart; a Chinese word has 1 or 2.
_SIZES = (2, 3, 4)
_CJK_SIZES = (1, 2)
_CJK = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+")
# A long prompt asks at its beginning or its end; both halves together fit the 256 tokens that the encoder reads.
_HALF_CHARS = 400


class SentenceEncoder(Protocol):
    """What the classifier needs of `workers.encoder.Encoder`."""

    identity: str
    """Name and hash of the weights, parted by `@`."""

    @property
    def dimension(self) -> int:
        """Return the length of a vector."""
        ...

    def encode(self, texts: Sequence[str]) -> Matrix:
        """Return one unit vector per text: (N, dimension) float32."""
        ...


def excerpt(text: str) -> str:
    """Return `text` as features see it: one line, its middle left out where it is long."""
    text = " ".join(text.split())  # first, or a margin of white space would hide the text
    if len(text) > 2 * _HALF_CHARS:
        text = f"{text[:_HALF_CHARS].rstrip()} {text[-_HALF_CHARS:].lstrip()}"
    return text


def text_features(texts: Sequence[str], encoder: SentenceEncoder) -> Matrix:
    """Return (N, dimension + NUM_BUCKETS) float32: both blocks of every text."""
    texts = [excerpt(text) for text in texts]
    glosses = [gloss(text) for text in texts]
    # In the n-grams a gloss stands beside its text, which is what makes Chinese learn from English examples.
    both = [text if text == glossed else f"{text} {glossed}" for text, glossed in zip(texts, glosses, strict=True)]
    return np.hstack([encoder.encode(glosses), ngram_features(both)])


def ngram_features(texts: Sequence[str]) -> Matrix:
    """Return (N, NUM_BUCKETS) float32: signed counts of hashed n-grams, each row of length 1 (0 for no text)."""
    features = np.zeros((len(texts), NUM_BUCKETS), dtype=np.float32)
    for row, text in zip(features, texts, strict=True):
        for ngram in _ngrams(text.lower()):
            # CRC-32 is the same on every machine, which Python's hash is not; its top bit is the sign.
            code = zlib.crc32(ngram.encode("utf-8", "replace"))
            row[code % NUM_BUCKETS] += 1.0 if code >> 31 else -1.0
        row /= max(float(np.linalg.norm(row)), 1.0)
    return features


def _ngrams(text: str) -> Iterator[str]:
    for run in _CJK.findall(text):
        yield from _slices(run, _CJK_SIZES)
    for run in _CJK.split(text):
        if run.strip():
            yield from _slices(f" {run.strip()} ", _SIZES)


def _slices(run: str, sizes: Sequence[int]) -> Iterator[str]:
    for size in sizes:
        for start in range(len(run) - size + 1):
            yield run[start : start + size]
