"""How much a request asks for: a score that routing compares with a threshold.

    complexity = Σ weight_i · (1 − exp(−count_i / scale_i))

over the counts of `_FEATURES`. Each count only grows when text is appended, so the score never falls; the weights add
up to 1, so it stays below 1; each term is saturated, so that no feature decides alone. The formula is ours: weights
and scales are set so that a plain question scores below 0.3 and a request with several conditions above 0.5.
Pure; knows English and Chinese words, other languages are scored by length, clauses and numbers.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

# Beyond this the score has long been saturated.
_MAX_CHARS = 16_384

_WORD = re.compile(r"[^\W\d_\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]+|[\uac00-\ud7af]+")
_CJK_CHARACTER = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]")
# A Chinese word has about 1.7 characters.
_WORDS_PER_CJK_CHARACTER = 0.6


@dataclass(frozen=True, slots=True, kw_only=True)
class _Feature:
    """One thing that is counted. The first `num_free` occurrences are normal and count nothing."""

    pattern: re.Pattern[str]
    weight: float
    scale: float
    num_free: int = 0


_LENGTH_WEIGHT, _LENGTH_SCALE = 0.40, 40.0
_FEATURES = (
    # clauses: every question has an end
    _Feature(pattern=re.compile(r"[,;:.!?](?=\s|$)|[，；：。！？、]"), weight=0.20, scale=4.0, num_free=1),
    # question words: one is a question, more are several
    _Feature(
        pattern=re.compile(
            r"\b(?:who|whom|whose|what|which|when|where|why|how)\b|什么|怎么|怎样|如何|为什么|为何|哪|谁|多少|多久|几|吗",
            re.IGNORECASE,
        ),
        weight=0.15,
        scale=2.0,
        num_free=1,
    ),
    # numbers: amounts and dates are conditions
    _Feature(pattern=re.compile(r"\d+(?:[.,:/-]\d+)*"), weight=0.10, scale=3.0),
    # conjunctions: what joins conditions
    _Feature(
        pattern=re.compile(
            r"\b(?:and|or|but|if|unless|because|since|although|though|while|whereas|however|then|than|both|either"
            r"|neither|instead|besides|compare|versus|vs)\b"
            r"|而且|并且|或者|还是|但是|不过|如果|要是|因为|所以|虽然|然后|同时|以及|另外|比较|分别|和|与|或|但",
            re.IGNORECASE,
        ),
        weight=0.15,
        scale=2.0,
    ),
)


def complexity(text: str) -> float:
    """Return the complexity of `text`: 0 for none, below 1 for any."""
    text = text[:_MAX_CHARS]
    num_words = len(_WORD.findall(text)) + _WORDS_PER_CJK_CHARACTER * len(_CJK_CHARACTER.findall(text))
    score = _LENGTH_WEIGHT * _saturated(num_words, _LENGTH_SCALE)
    for feature in _FEATURES:
        count = max(0, len(feature.pattern.findall(text)) - feature.num_free)
        score += feature.weight * _saturated(count, feature.scale)
    return score


def _saturated(count: float, scale: float) -> float:
    return 1.0 - math.exp(-count / scale)
