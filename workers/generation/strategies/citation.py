"""Which passage supports which sentence of an answer. Pure, English and Chinese.

The model does not cite, so we attribute: a sentence is credited to the passage that shares the largest part of its
content terms, if that part reaches MIN_SUPPORT and the passage has all numbers of the sentence. A number that the
passage does not have is the usual sign of an invented fact.
"""

from __future__ import annotations

from collections.abc import Sequence

from schemas.retrieval import Passage
from schemas.tokens import Citation
from workers.generation.strategies.evidence import Gist, gist_of, overlap, sentences

MIN_SUPPORT = 0.6  # below, related passages of one knowledge base begin to match each other's sentences
MIN_TERMS = 2  # "Yes." supports nothing


def cite(text: str, passages: Sequence[Passage], *, index: int = 0) -> tuple[Citation, ...]:
    """Return one citation for each supported sentence; offsets are characters of `text`.

    Neighbouring sentences of one passage make one citation with the lower of their scores.
    """
    found: list[Citation] = []
    gists = [gist_of(passage) for passage in passages]
    for sentence in sentences(text) if passages else ():
        gist = Gist.of(sentence.text)
        best = max((support(gist, whole), -place) for place, whole in enumerate(gists))
        if best[0] < MIN_SUPPORT:
            continue
        passage = passages[-best[1]]
        citation = Citation(
            passage_id=passage.passage_id,
            title=passage.title,
            start=sentence.start,
            end=sentence.end,
            score=round(best[0], 4),
            index=index,
        )
        found.append(citation)
    return tuple(_merged(found, text))


def support(sentence: Gist, passage: Gist) -> float:
    """Return how far a passage supports a sentence: the share of its content terms, 0 if a number is missing."""
    if sentence.terms.total() < MIN_TERMS or sentence.numbers - passage.numbers:
        return 0.0
    return overlap(sentence, passage)


def _merged(citations: Sequence[Citation], text: str) -> list[Citation]:
    merged: list[Citation] = []
    for citation in citations:
        last = merged[-1] if merged else None
        if last and last.passage_id == citation.passage_id and not text[last.end : citation.start].strip():
            merged[-1] = Citation(
                passage_id=last.passage_id,
                title=last.title,
                start=last.start,
                end=citation.end,
                score=min(last.score, citation.score),
                index=last.index,
            )
        else:
            merged.append(citation)
    return merged
