"""From the hits of both channels to the passages of a question: fuse, drop what does not fit, cut. Pure.

The encoder is English, so for a Chinese (Japanese, Korean) question its places mean nothing: there the keyword channel
decides alone. Its vector of a Chinese passage, unknown words but for a few codes and numbers, is near to any gibberish,
so that an English question needs a greater cosine there. A passage stays if either channel says that it has to do
with the question: fusion alone looks at places, and something always stands first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from schemas.retrieval import Passage
from workers.retrieval.fusion import reciprocal_rank_fusion
from workers.retrieval.keyword_index import KeywordHit
from workers.retrieval.terms import is_mostly_cjk


@dataclass(frozen=True, slots=True, kw_only=True)
class RankingSettings:
    """How hits become passages.

    The limits are measured on the demo's tuning questions and its out-of-scope utterances: the right passage of an
    English question has a cosine of 0.35 at least (median 0.65), and of 139 unrelated utterances 27 find a passage of
    0.32 or more. Words alone prove little in English, where an unrelated "bank" or "size" covers as much of a short
    question as a right answer does, so that there nearly every term must be found. For Chinese questions, which have
    words alone, the limit is half of the least that a right passage covers (0.51, median 0.93 of 16), because so few
    questions say little about the next one; 6 of 29 unrelated utterances pass it. Emoji and strings of letters come as
    near as 0.45 to a Chinese passage.
    """

    candidates: int = 50
    semantic_weight: float = 1.0
    keyword_weight: float = 1.0
    min_cosine: float = 0.32
    other_min_cosine: float = 0.5
    min_coverage: float = 0.9
    cjk_min_coverage: float = 0.25


def rank(
    question: str,
    semantic: Sequence[tuple[str, float]],
    keyword: Sequence[KeywordHit],
    passages: Mapping[str, Passage],
    *,
    num_passages: int,
    settings: RankingSettings,
) -> tuple[Passage, ...]:
    """Return at most `num_passages` passages with their scores and places, best first.

    `semantic` holds ids with their cosine, `passages` what is still in the catalog of the ids in both channels.
    Passages in the script of the question stand before others, which a product code may have found.
    """
    is_cjk = is_mostly_cjk(question)
    places = {id_: (place, cosine) for place, (id_, cosine) in enumerate(semantic, start=1)}
    words = {hit.id: (place, hit) for place, hit in enumerate(keyword, start=1)}
    fused = reciprocal_rank_fusion(
        {"semantic": list(places), "keyword": list(words)},
        {"semantic": 0.0 if is_cjk else settings.semantic_weight, "keyword": settings.keyword_weight},
    )
    same_script: list[Passage] = []
    other_script: list[Passage] = []
    for id_, score in fused:
        passage = passages.get(id_)
        semantic_rank, cosine = places.get(id_, (0, 0.0))
        keyword_rank, hit = words.get(id_, (0, None))
        coverage = hit.coverage if hit else 0.0
        if passage is None:
            continue
        has_same_script = is_mostly_cjk(passage.text) == is_cjk
        min_cosine = settings.min_cosine if has_same_script else settings.other_min_cosine
        if not _is_relevant(cosine >= min_cosine, coverage, is_cjk, settings):
            continue
        scored = msgspec.structs.replace(
            passage,
            score=score,
            semantic_rank=semantic_rank,
            keyword_rank=keyword_rank,
            semantic_score=cosine,
            keyword_score=hit.score if hit else 0.0,
        )
        (same_script if has_same_script else other_script).append(scored)
        if len(same_script) == num_passages:
            break
    return tuple([*same_script, *other_script][:num_passages])


def _is_relevant(is_near: bool, coverage: float, is_cjk: bool, settings: RankingSettings) -> bool:
    if is_cjk:
        return coverage >= settings.cjk_min_coverage
    return is_near or coverage >= settings.min_coverage
