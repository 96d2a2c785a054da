"""Long text to passages that end where sentences end. Pure.

The invariant: every sentence of the text stands in some passage, in order, and no passage is longer than the limit;
a sentence that is longer is cut between words, and a word of more than MAX_WORD_CHARS inside. Takes time in proportion
to the text, whatever it is made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from workers.retrieval.terms import CJK

MAX_WORD_CHARS = 40  # longer runs are data or rules of dashes; each such piece weighs as a word

_CJK_CHAR = re.compile(rf"[{CJK}]")
_WORD = re.compile(rf"(?:(?![{CJK}])\S){{1,{MAX_WORD_CHARS}}}")
_PART = re.compile(rf"[{CJK}]|{_WORD.pattern}|\s+")
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


@dataclass(frozen=True, slots=True)
class _Piece:
    """A sentence or a part of one, and its weight."""

    text: str
    weight: float


def split_text(text: str, limits: SplitLimits | None = None) -> list[str]:
    """Return the passages of a text, one if it is short; empty for white space."""
    limits = limits or SplitLimits()
    text = text.strip()
    if _weight(text, limits) <= limits.max_weight:
        return [text] if text else []
    passages: list[list[_Piece]] = [[]]
    weight = 0.0  # of the last passage
    for piece in _sentences(text, limits):
        if passages[-1] and weight + piece.weight > limits.max_weight:
            passages.append(_overlap(passages[-1], piece, limits))
            weight = sum(kept.weight for kept in passages[-1])
        passages[-1].append(piece)
        weight += piece.weight
    return ["".join(piece.text for piece in passage).strip() for passage in passages]


def _weight(text: str, limits: SplitLimits) -> float:
    return len(_WORD.findall(text)) + limits.cjk_weight * len(_CJK_CHAR.findall(text))


def _sentences(text: str, limits: SplitLimits) -> Iterator[_Piece]:
    start = 0
    for end in [match.end() for match in _SENTENCE_END.finditer(text)] + [len(text)]:
        sentence = text[start:end]
        start = end
        weight = _weight(sentence, limits)
        if weight > limits.max_weight:
            yield from _cut(sentence, limits)
        elif sentence:
            yield _Piece(sentence, weight)


def _cut(sentence: str, limits: SplitLimits) -> Iterator[_Piece]:
    """Cut a sentence that is too long (a table, a list without full stops) between words or characters."""
    parts: list[str] = []
    weight = 0.0
    for part in _PART.findall(sentence):
        part_weight = _weight(part, limits)
        if parts and weight + part_weight > limits.max_weight:
            yield _Piece("".join(parts), weight)
            parts, weight = [], 0.0
        parts.append(part)
        weight += part_weight
    if parts:
        yield _Piece("".join(parts), weight)


def _overlap(passage: list[_Piece], following: _Piece, limits: SplitLimits) -> list[_Piece]:
    """Return the last sentences of a passage that may be repeated before `following`."""
    kept: list[_Piece] = []
    weight = 0.0
    for piece in reversed(passage):
        weight += piece.weight
        if weight > limits.overlap or weight + following.weight > limits.max_weight:
            break
        kept.append(piece)
    return kept[::-1]
