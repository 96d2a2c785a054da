from __future__ import annotations

from workers.retrieval.keyword_index import KeywordIndex

TEXTS = [
    ("shoes", "You have 30 days to return shoes."),
    ("coat", "Coats can be returned within 45 days."),
    ("boot", "The AF-2041 boot weighs 540 grams."),
    ("zh", "鞋类商品自签收之日起30天内可以退货。"),
]


def index() -> KeywordIndex:
    made = KeywordIndex()
    made.apply(TEXTS)
    return made


def ids(found: KeywordIndex, text: str, k: int = 10) -> list[str]:
    return [hit.id for hit in found.search(text, k)]


def test_passages_are_found_by_stem_code_and_chinese_word() -> None:
    found = index()
    assert ids(found, "returning a shoe")[0] == "shoes"
    assert ids(found, "af2041 weight") == ["boot"]
    assert ids(found, "退货")[0] == "zh"
    assert ids(found, "how do I") == [] and ids(found, "") == []


def test_at_most_k_are_returned() -> None:
    assert len(ids(index(), "days return", 1)) == 1
    assert ids(index(), "days", 0) == []


def test_changes_are_visible_at_once() -> None:
    found = index()
    found.apply([("shoes", "Sandals only."), ("new", "A new tent.")], removed=["coat", "unknown"])
    assert ids(found, "shoes returned coats") == []
    assert ids(found, "tent") == ["new"] and ids(found, "sandals") == ["shoes"]
    assert len(found) == 4


def test_empty_index_finds_nothing() -> None:
    assert ids(KeywordIndex(), "shoes") == []


def test_coverage_is_near_one_for_all_terms_and_low_for_a_common_one() -> None:
    found = index()
    [all_terms] = [hit for hit in found.search("AF-2041 weighs", 5) if hit.id == "boot"]
    assert all_terms.coverage > 0.8
    assert all(hit.coverage < 0.3 for hit in found.search("submarine periscope glass days", 5))


def test_question_of_a_thousand_words_is_searched_by_its_rarest() -> None:
    text = " ".join(f"word{number}" for number in range(1000)) + " days " * 50 + "2041"
    found = index()
    assert isinstance(ids(found, text), list)


def test_equal_scores_stand_in_the_order_of_the_ids() -> None:
    found = KeywordIndex()
    found.apply([(id_, "same text") for id_ in "cab"])
    assert ids(found, "text") == ["a", "b", "c"]
