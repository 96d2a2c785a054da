"""Which sentence says it: splits text into sentences and measures what two texts share. Pure, English and Chinese.

Words are compared by their stems, numbers as they stand; Chinese without spaces is compared by pairs of neighbouring
characters (Nie et al. 2000: bigrams serve retrieval as well as word segmentation).
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import Stemmer

from schemas.retrieval import Passage

_SENTENCE_END = re.compile(
    r"(?<=[。！？；])"  # Chinese marks end a sentence wherever they stand
    r"|(?<=[.!?])(?=\s)(?<!\b[A-Za-z]\.)(?<!\be\.g\.)(?<!\bi\.e\.)(?<!\bNo\.)(?<!\b[ap]\.m\.)"
    r"|(?<=[.!?][\"')\]])(?=\s)"
    r"|(?<=\n)"
)
_TERM = re.compile(r"\d+(?:[.,:]\d+)*|[A-Za-z]+(?:['’][a-z]+)?|[㐀-鿿豈-﫿]+")
_STOP_TEXT = """
    a an and any are as at be been but by can could did do does for from had has have he her his how i if in into is it
    its it's i'm may me more much my no not of on one or our out she should so some than that the their them then there
    these they this to too up us was we were what when where which who why will with would you your don't many long
    please tell know need want get
"""
_STOP_WORDS = frozenset(_STOP_TEXT.split())
_ASKS_NUMBER = re.compile(
    r"\b(?:how (?:many|much|long|often|soon|fast|quickly|big|far|heavy|large)|when|price|cost|fee|percent|weight|size"
    r"|temperature|number|maximum|minimum|deadline|amount|what time)\b|多少|几|多久|多长|什么时候|多大|多重|电话|费",
    re.IGNORECASE,
)
_NEGATION = re.compile(r"\b(?:not|no|never|none|nor|cannot|without)\b|n['’]t\b|不|没|无|未", re.IGNORECASE)
SUPPORTED = 0.8  # below, a word of the model's own is likely to change the meaning
_STOP_BIGRAMS = frozenset(
    ["多少", "可以", "什么", "怎么", "你们", "我们", "请问", "是否", "需要", "的是", "如何", "多久", "哪里", "一个"]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """A sentence with its place: characters `start` to `end` of the text it was cut from."""

    text: str
    start: int
    end: int


def sentences(text: str) -> list[Sentence]:
    """Cut a text into sentences without their surrounding white space."""
    cuts = [0, *(match.start() for match in _SENTENCE_END.finditer(text)), len(text)]
    found = []
    for start, end in itertools.pairwise(cuts):
        piece = text[start:end]
        if piece.strip():
            first = start + len(piece) - len(piece.lstrip())
            found.append(Sentence(text=piece.strip(), start=first, end=first + len(piece.strip())))
    return found


def terms(text: str) -> Counter[str]:
    """Return the terms that carry content, with their counts: stems, numbers, pairs of Chinese characters."""
    return Counter(_terms(text))


def numbers(text: str) -> frozenset[str]:
    """Return the numbers in a text, without thousands separators."""
    return frozenset(term for term in _terms(text) if term[0].isdigit())


def is_chinese(text: str) -> bool:
    """Say whether Chinese characters make up a fifth of the letters; names and codes in Latin letters are common."""
    chinese = sum("㐀" <= character <= "鿿" for character in text)
    return chinese * 5 >= max(1, sum(character.isalpha() for character in text))


def rarity(texts: Sequence[str]) -> dict[str, float]:
    """Return the inverse document frequency of each term over some texts (Robertson and Spärck Jones 1976)."""
    counts = Counter(term for text in texts for term in set(_terms(text)))
    return {term: math.log(1 + (len(texts) - count + 0.5) / (count + 0.5)) for term, count in counts.items()}


def overlap(part: str, whole: str) -> float:
    """Return which share of the content terms of `part` stands in `whole`, 0 to 1."""
    mine, theirs = terms(part), terms(whole)
    return sum((mine & theirs).values()) / max(1, sum(mine.values()))


def best_sentences(question: str, passages: Sequence[Passage]) -> list[tuple[float, Passage, Sentence]]:
    """Return all sentences of the passages, those that answer the question first, with their scores.

    A sentence counts for the share of the question's rare terms that it has, its passage for half of that; it gains
    by an earlier passage, by standing first (a passage states its fact there), and by a number that is asked for.
    """
    texts = [f"{passage.title} {passage.text}" for passage in passages]
    weights, wanted = rarity(texts), terms(question).keys()
    total = _weight(wanted, weights) or 1.0
    asks, given = bool(_ASKS_NUMBER.search(question)), numbers(question)
    scored = []
    for place, (passage, text) in enumerate(zip(passages, texts, strict=True)):
        around = _weight(wanted & terms(text).keys(), weights) / total
        for order, sentence in enumerate(sentences(passage.text)):
            own = _weight(wanted & terms(sentence.text).keys(), weights) / total
            answers = asks and bool(numbers(sentence.text) - given)
            score = own + 0.5 * around - 0.4 * place + 0.4 * answers + 0.3 * (order == 0)
            scored.append((score, passage, sentence))
    return sorted(scored, key=lambda hit: -hit[0])


def is_supported(sentence: str, source: str) -> bool:
    """Say whether a sentence adds nothing: nearly all content terms, all numbers, the same negation."""
    if sum(terms(sentence).values()) < 2 or numbers(sentence) - numbers(source):
        return False
    if bool(_NEGATION.search(sentence)) != bool(_NEGATION.search(source)):
        return False
    return overlap(sentence, source) >= SUPPORTED


def _weight(shared: Iterable[str], weights: dict[str, float]) -> float:
    return sum(weights.get(term, 0.0) for term in shared)


@lru_cache(maxsize=4_096)
def _terms(text: str) -> tuple[str, ...]:
    found: list[str] = []
    for match in _TERM.finditer(text):
        token = match.group()
        if token[0].isdigit():
            found.append(token.replace(",", "").rstrip(".:"))
        elif token[0].isascii():
            if token.lower() not in _STOP_WORDS:
                found.append(_stem(token.lower().removesuffix("'s").removesuffix("’s")))
        else:
            pairs = [token[place : place + 2] for place in range(max(1, len(token) - 1))]
            found.extend(pair for pair in pairs if pair not in _STOP_BIGRAMS)
    return tuple(found)


@lru_cache(maxsize=65_536)
def _stem(word: str) -> str:
    return str(Stemmer.Stemmer("english").stemWord(word))
