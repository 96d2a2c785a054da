from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.retrieval import Passage
from workers.generation.strategies import evidence
from workers.generation.strategies.citation import cite, support
from workers.generation.strategies.evidence import (
    Gist,
    best_sentences,
    gist_of,
    is_supported,
    overlap,
    sentences,
    terms,
)

SHOES = Passage(
    passage_id="shoes", title="Returning shoes", text="You have 30 days to return shoes. The box must be in the parcel."
)
FEES = Passage(passage_id="fees", title="Return fee", text="A return by post costs $4.50. In a store it is free.")
CHINESE = Passage(
    passage_id="zh-shoes", title="鞋类退货", text="鞋类商品自签收之日起30天内可以退货。请把鞋放回原鞋盒。"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("It costs $4.50. Nothing else.", ["It costs $4.50.", "Nothing else."]),
        ("From 9 a.m. to 5 p.m. daily. Closed now!", ["From 9 a.m. to 5 p.m. daily.", "Closed now!"]),
        ("运费12元。满299元包邮！还有问题？", ["运费12元。", "满299元包邮！", "还有问题？"]),
        ("- one\n- two", ["- one", "- two"]),
        ('He said "Stop." Then he left.', ['He said "Stop."', "Then he left."]),
        ("", []),
    ],
)  # fmt: skip
def test_sentences_end_where_readers_end_them(text: str, expected: list[str]) -> None:
    assert [sentence.text for sentence in sentences(text)] == expected


@given(st.text("ab. !?\n。你$1", max_size=40))
def test_sentences_stand_where_they_say_and_lose_nothing(text: str) -> None:
    found = sentences(text)
    assert all(text[sentence.start : sentence.end] == sentence.text for sentence in found)
    assert "".join("".join(s.text.split()) for s in found) == "".join(text.split())


def test_terms_are_stems_numbers_and_pairs_of_characters() -> None:
    assert set(terms("Returning the shoes costs 1,250 dollars")) == {"return", "shoe", "cost", "1250", "dollar"}
    assert set(terms("退货期限")) == {"退货", "货期", "期限"}
    assert Gist.of("from 10:30 to 12, $4.50").numbers == {"10:30", "12", "4.50"}


def test_best_sentence_answers_the_question() -> None:
    hits = best_sentences("How many days may I keep shoes before I return them?", [SHOES, FEES])
    assert hits[0][2].text == "You have 30 days to return shoes."
    hits = best_sentences("What does a return by post cost?", [FEES, SHOES])
    assert hits[0][2].text == "A return by post costs $4.50."
    assert best_sentences("鞋子几天内可以退货", [CHINESE])[0][2].text == "鞋类商品自签收之日起30天内可以退货。"


@pytest.mark.parametrize(
    ("sentence", "is_expected"),
    [
        ("You have 30 days to return the shoes.", True),
        ("You have 14 days to return shoes.", False),
        ("You do not have 30 days to return shoes.", False),
        ("You have 30 days to return shoes by carrier pigeon in Alaska.", False),
        ("Yes.", False),
    ],
)
def test_sentence_is_supported_only_in_words_numbers_and_negation(sentence: str, is_expected: bool) -> None:
    assert is_supported(Gist.of(sentence), Gist.of("You have 30 days to return shoes.")) is is_expected


def test_each_sentence_is_credited_to_the_passage_that_says_it() -> None:
    text = "You have 30 days to return shoes. A return by post costs $4.50. Have a nice day, dear friend!"
    first, second = cite(text, [FEES, SHOES], index=1)
    assert (first.passage_id, text[first.start : first.end]) == ("shoes", "You have 30 days to return shoes.")
    assert (second.passage_id, text[second.start : second.end]) == ("fees", "A return by post costs $4.50.")
    assert first.index == second.index == 1
    assert first.score == 1.0


def test_invented_number_is_credited_to_nobody() -> None:
    assert cite("You have 14 days to return shoes.", [SHOES, FEES]) == ()
    assert support(Gist.of("You have 14 days to return shoes."), gist_of(SHOES)) == 0.0


def test_neighbouring_sentences_of_one_passage_make_one_citation() -> None:
    (citation,) = cite(SHOES.text, [SHOES])
    assert (citation.start, citation.end) == (0, len(SHOES.text))


def test_chinese_sentences_are_credited_too() -> None:
    text = "鞋类商品30天内可以退货。"
    (citation,) = cite(text, [SHOES, CHINESE])
    assert (citation.passage_id, citation.start, citation.end) == ("zh-shoes", 0, len(text))


@given(st.text(max_size=60), st.lists(st.text(max_size=60), max_size=3))
def test_citations_never_fail_and_lie_inside_the_text(text: str, passages: list[str]) -> None:
    for citation in cite(text, [Passage(text=passage, passage_id="p") for passage in passages]):
        assert 0 <= citation.start < citation.end <= len(text)
    assert 0 <= overlap(Gist.of(text), Gist.of(text)) <= 1


def test_nothing_of_a_text_outlives_its_answer() -> None:
    text = " ".join(f"w{'ab'[place % 2]}{'x' * 50}" for place in range(100))
    before = evidence._cached_stem.cache_info().currsize
    cite(text, [Passage(text=text)])
    best_sentences(text, [Passage(text=text)])
    cached = [value for value in vars(evidence).values() if hasattr(value, "cache_info")]
    assert cached == [evidence._cached_stem]
    assert evidence._cached_stem.cache_info().currsize - before <= 2


def test_offsets_of_citations_are_characters_whatever_their_width() -> None:
    text = "🌶️👨‍👩‍👧 Hi!! You have 30 days to return shoes. 你好。"
    (citation,) = cite(text, [SHOES])
    assert text[citation.start : citation.end] == "You have 30 days to return shoes."
