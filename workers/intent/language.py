"""Which language a text is in, by its script alone.

Tells apart what is written differently, not English from French: every text in Latin letters counts as `en`.
Pure. The result is always two lower-case letters (ISO 639-1).
"""

from __future__ import annotations

import re

DEFAULT_LANGUAGE = "en"

_SCRIPTS = {
    "zh": "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff",  # Han
    "ja": "\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff\uff66-\uff9f",  # kana
    "ko": "\u1100-\u11ff\u3130-\u318f\uac00-\ud7af",
    "ru": "\u0400-\u052f",
    "el": "\u0370-\u03ff",
    "ar": "\u0600-\u06ff\u0750-\u077f",
    "he": "\u0590-\u05ff",
    "hi": "\u0900-\u097f",
    "th": "\u0e00-\u0e7f",
    "en": "A-Za-z\u00c0-\u024f\uff21-\uff3a\uff41-\uff5a",  # Latin
}
# Chinese, Japanese and Thai don't part words: one character is about 0.6 words (a Chinese word has 1.7 characters).
_CHARACTER_WORDS = {"zh": 0.6, "ja": 0.6, "th": 0.3}
_RUNS = {
    language: re.compile(f"[{letters}]" if language in _CHARACTER_WORDS else f"[{letters}]+")
    for language, letters in _SCRIPTS.items()
}
# Japanese mixes kana into Han everywhere; a Chinese text has at most the の of a shop's name.
_MIN_KANA_SHARE = 0.1
_TAG = re.compile(r"(?P<primary>[A-Za-z]{2})(?:[-_][A-Za-z0-9]{1,8})*")
# More text than this doesn't change the verdict.
_MAX_CHARS = 4096


def detect_language(text: str) -> str:
    """Return the language whose script has the most words in `text`; `en` where there are no letters at all."""
    text = text[:_MAX_CHARS]
    num_runs = {language: len(run.findall(text)) for language, run in _RUNS.items()}
    han, kana = num_runs.pop("zh"), num_runs.pop("ja")
    num_runs["ja" if kana > _MIN_KANA_SHARE * (han + kana) else "zh"] = han + kana
    words = {language: count * _CHARACTER_WORDS.get(language, 1.0) for language, count in num_runs.items()}
    best = max(words, key=words.__getitem__)
    return best if words[best] > 0 else DEFAULT_LANGUAGE


def resolve_language(requested: str | None, text: str) -> str:
    """Return the two letters of a requested language tag such as `zh-Hans-CN`, or else what `text` is written in."""
    tag = _TAG.fullmatch(requested or "")
    return tag["primary"].lower() if tag else detect_language(text)
