"""Long text to passages that end where sentences end. Pure.

The invariant: every sentence of the text stands in some passage, in order, and no passage is longer than the limit
unless a single sentence is, which is then cut between words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from workers.retrieval.terms import CJK

_CJK_CHAR = re.compile(rf"[{CJK}]")
_WORD = re.compile(rf"(?:(?![{CJK}])\S)+")
# After . ! ? with white space, after their Chinese forms without, and at empty lines.
_SENTENCE_END = re.compile(r"(?<=[.!?…])[\"'”’)]*\s+|(?<=[。！？；])[”’」』）]*|\n\s*\n")


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitLimits:
    """How large a passage may be.

    One weight is one English word; 180 words with a title are about 256 word pieces, all that the encoder reads, and a
    Chinese character weighs 0.45 of a word, which makes 400 characters. `overlap` is what a passage repeats of the one
    before it, so that a fact that leans on its predecessor keeps it.
    """

    max_weight: float = 180
    overlap: float = 30
    cjk_weight: float = 0.45


def split_text(text: str, limits: SplitLimits | None = None) -> list[str]:
    """Return the passages of a text, one if it is short; empty for white space."""
    limits = limits or SplitLimits()
    text = text.strip()
    if _weight(text, limits) <= limits.max_weight:
        return [text] if text else []
    passages: list[list[str]] = [[]]
    for sentence in _sentences(text, limits):
        if passages[-1] and _weight("".join([*passages[-1], sentence]), limits) > limits.max_weight:
            passages.append(_overlap(passages[-1], sentence, limits))
        passages[-1].append(sentence)
    return ["".join(passage).strip() for passage in passages]


def _weight(text: str, limits: SplitLimits) -> float:
    return len(_WORD.findall(text)) + limits.cjk_weight * len(_CJK_CHAR.findall(text))


def _sentences(text: str, limits: SplitLimits) -> Iterator[str]:
    start = 0
    for end in [match.end() for match in _SENTENCE_END.finditer(text)] + [len(text)]:
        sentence = text[start:end]
        start = end
        if _weight(sentence, limits) <= limits.max_weight:
            if sentence:
                yield sentence
        else:
            yield from _cut(sentence, limits)


def _cut(sentence: str, limits: SplitLimits) -> Iterator[str]:
    """Cut a sentence that is too long (a table, a list without full stops) between words or characters."""
    piece, weight = "", 0.0
    for part in re.findall(rf"[{CJK}]|(?:(?![{CJK}])\S)+|\s+", sentence):
        part_weight = _weight(part, limits)
        if piece and weight + part_weight > limits.max_weight:
            yield piece
            piece, weight = "", 0.0
        piece, weight = piece + part, weight + part_weight
    if piece:
        yield piece


def _overlap(passage: list[str], following: str, limits: SplitLimits) -> list[str]:
    """Return the last sentences of a passage that may be repeated before `following`."""
    kept: list[str] = []
    for sentence in reversed(passage):
        candidate = "".join([sentence, *kept])
        if _weight(candidate, limits) > limits.overlap or _weight(candidate + following, limits) > limits.max_weight:
            break
        kept.insert(0, sentence)
    return kept
