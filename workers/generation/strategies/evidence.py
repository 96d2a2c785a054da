"""Which sentence says it: splits text into sentences and measures what two texts share. Pure, English and Chinese.

Words are compared by their stems, numbers as they stand; Chinese without spaces is compared by pairs of neighbouring
characters (Nie et al. 2000: bigrams serve retrieval as well as word segmentation). Clients send passages of any size,
so a text is read once, into a `Gist`, and nothing of it is kept beyond the answer.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
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
MAX_WORD_CHARS = 40  # what is longer is no word; the cache of stems would grow with it
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Gist:
    """What of a text is compared."""

    terms: Counter[str]
    numbers: frozenset[str]
    is_negated: bool

    @classmethod
    def of(cls, text: str) -> Gist:
        """Read a text."""
        found = terms(text)
        return cls(
            terms=found,
            numbers=frozenset(term for term in found if term[0].isdigit()),
            is_negated=bool(_NEGATION.search(text)),
        )


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


def is_chinese(text: str) -> bool:
    """Say whether Chinese characters make up a fifth of the letters; names and codes in Latin letters are common."""
    chinese = sum("㐀" <= character <= "鿿" for character in text)
    return chinese * 5 >= max(1, sum(character.isalpha() for character in text))


def rarity(texts: Sequence[Gist]) -> dict[str, float]:
    """Return the inverse document frequency of each term over some texts (Robertson and Spärck Jones 1976)."""
    counts = Counter(term for text in texts for term in text.terms)
    return {term: math.log(1 + (len(texts) - count + 0.5) / (count + 0.5)) for term, count in counts.items()}


def overlap(part: Gist, whole: Gist) -> float:
    """Return which share of the content terms of `part` stands in `whole`, 0 to 1."""
    shared = sum(min(count, whole.terms[term]) for term, count in part.terms.items())
    return shared / max(1, part.terms.total())


def best_sentences(question: str, passages: Sequence[Passage]) -> list[tuple[float, Passage, Sentence]]:
    """Return all sentences of the passages, those that answer the question first, with their scores.

    A sentence counts for the share of the question's rare terms that it has, its passage for half of that; it gains
    by an earlier passage, by standing first (a passage states its fact there), and by a number that is asked for.
    """
    asked, texts = Gist.of(question), [gist_of(passage) for passage in passages]
    weights, wanted = rarity(texts), asked.terms.keys()
    total = _weight(wanted, weights) or 1.0
    asks = bool(_ASKS_NUMBER.search(question))
    scored = []
    for place, (passage, text) in enumerate(zip(passages, texts, strict=True)):
        around = _weight(wanted & text.terms.keys(), weights) / total
        for order, sentence in enumerate(s for s in sentences(passage.text) if says_something(s.text)):
            gist = Gist.of(sentence.text)
            own = _weight(wanted & gist.terms.keys(), weights) / total
            answers = asks and bool(gist.numbers - asked.numbers)
            score = own + 0.5 * around - 0.4 * place + 0.4 * answers + 0.3 * (order == 0)
            scored.append((score, passage, sentence))
    return sorted(scored, key=lambda hit: -hit[0])


def gist_of(passage: Passage) -> Gist:
    """Read a passage with its title."""
    return Gist.of(f"{passage.title} {passage.text}")


def says_something(text: str) -> bool:
    """Say whether there is more than white space and marks."""
    return any(character.isalnum() for character in text)


def is_supported(sentence: Gist, source: Gist) -> bool:
    """Say whether a sentence adds nothing: nearly all content terms, all numbers, the same negation."""
    if sentence.terms.total() < 2 or sentence.numbers - source.numbers or sentence.is_negated != source.is_negated:
        return False
    return overlap(sentence, source) >= SUPPORTED


def _weight(shared: Iterable[str], weights: dict[str, float]) -> float:
    return sum(weights.get(term, 0.0) for term in shared)


def _terms(text: str) -> Iterator[str]:
    for match in _TERM.finditer(text):
        token = match.group()
        if token[0].isdigit():
            yield token.replace(",", "").rstrip(".:")
        elif token[0].isascii():
            if token.lower() not in _STOP_WORDS:
                yield _stem(token.lower().removesuffix("'s").removesuffix("’s"))
        else:
            pairs = [token[place : place + 2] for place in range(max(1, len(token) - 1))]
            yield from (pair for pair in pairs if pair not in _STOP_BIGRAMS)


def _stem(word: str) -> str:
    return _cached_stem(word) if len(word) <= MAX_WORD_CHARS else word


@lru_cache(maxsize=65_536)
def _cached_stem(word: str) -> str:
    return str(Stemmer.Stemmer("english").stemWord(word))
