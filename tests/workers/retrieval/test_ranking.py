from __future__ import annotations

from schemas.retrieval import Passage
from workers.retrieval.keyword_index import KeywordHit
from workers.retrieval.ranking import RankingSettings, rank

TEXTS = {"a": "Return shoes.", "b": "Return coats.", "c": "Stores.", "zh": "鞋类商品可以退货。"}
PASSAGES = {id_: Passage(text=text, passage_id=id_) for id_, text in TEXTS.items()}
SETTINGS = RankingSettings(min_cosine=0.3, min_coverage=0.9, cjk_min_coverage=0.1)


def word(id_: str, coverage: float) -> KeywordHit:
    return KeywordHit(id=id_, score=10 * coverage, coverage=coverage)


def ids(
    question: str, semantic: list[tuple[str, float]], keyword: list[KeywordHit], num_passages: int = 4
) -> list[str]:
    found = rank(question, semantic, keyword, PASSAGES, num_passages=num_passages, settings=SETTINGS)
    return [passage.passage_id for passage in found]


def test_channels_are_fused_and_cut() -> None:
    semantic, keyword = [("a", 0.8), ("b", 0.7), ("c", 0.4)], [word("b", 0.5), word("a", 0.4)]
    assert ids("return", semantic, keyword) == ["a", "b", "c"]
    assert ids("return", semantic, keyword, 1) == ["a"]


def test_passage_carries_the_places_and_scores_of_both_channels() -> None:
    [found] = rank("q", [("b", 0.1), ("a", 0.8)], [word("a", 0.5)], PASSAGES, num_passages=1, settings=SETTINGS)
    assert (found.semantic_rank, found.keyword_rank) == (2, 1)
    assert (found.semantic_score, found.keyword_score) == (0.8, 5.0)
    assert found.score == 1 / 62 + 1 / 61


def test_passages_that_do_not_fit_are_dropped() -> None:
    assert ids("weather tomorrow", [("a", 0.2), ("b", 0.1)], [word("c", 0.4)]) == []
    assert ids("AF-2041", [("a", 0.2)], [word("c", 1.0)]) == ["c"]


def test_chinese_question_is_decided_by_words_alone() -> None:
    assert ids("怎么退货", [("a", 0.9)], [word("zh", 0.2)]) == ["zh"]
    assert ids("怎么退货", [("a", 0.9)], [word("zh", 0.05)]) == []


def test_script_of_the_question_comes_first() -> None:
    assert ids("AF-2041 鞋多重", [], [word("a", 0.9), word("zh", 0.3)]) == ["zh", "a"]
    assert ids("AF-2041 weight", [("zh", 0.6), ("a", 0.5)], []) == ["a", "zh"]


def test_vector_of_another_script_must_be_nearer_because_gibberish_is_near_it_too() -> None:
    assert ids("aaaaaaaa", [("zh", 0.45), ("a", 0.35)], []) == ["a"]
    assert ids("AF-2041", [("zh", 0.45)], [word("zh", 1.0)]) == ["zh"]


def test_passage_that_has_left_the_catalog_is_left_out() -> None:
    assert ids("return", [("gone", 0.9), ("a", 0.8)], []) == ["a"]
