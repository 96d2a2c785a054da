from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.retrieval.terms import MAX_TERM_CHARS, is_mostly_cjk, terms


@pytest.mark.parametrize("text", ["AF-2041", "af2041", "ＡＦ－２０４１", "the af-2041's sole"])
def test_product_code_is_found_in_every_spelling(text: str) -> None:
    assert {"af2041", "af", "2041"} <= set(terms(text))


def test_code_is_kept_whole_and_split() -> None:
    assert set(terms("30-day")) == {"30-day", "30day", "30", "day"}
    assert set(terms("400-820-0142")) >= {"400-820-0142", "4008200142", "820"}


def test_halves_of_decimals_and_times_are_no_terms() -> None:
    assert terms("$4.50 at 9:30") == ["4.50", "9:30"]


def test_english_is_stemmed_folded_and_rid_of_stop_words() -> None:
    assert terms("How do I return the Shoes' cafés?") == ["return", "shoe", "cafe"]


def test_chinese_is_cut_into_words_and_pairs_without_stop_words() -> None:
    found = terms("鞋类商品多少天内可以退货？")
    assert {"退货", "商品", "退货_"} <= set(found)
    assert not {"可以", "多少", "以退_", "多少_"} & set(found)


def test_mixed_scripts_are_taken_apart() -> None:
    assert {"af-2041", "30", "天", "容量"} <= set(terms("AF-2041的容量，30天"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("How long?", False),
        ("退货", True),
        ("AF-2041 单只有多重？", True),
        ("the word 鞋 in a sentence", False),
        ("", False),
    ],
)
def test_script_is_that_of_most_of_the_text(text: str, expected: bool) -> None:
    assert is_mostly_cjk(text) is expected


@given(st.text())
def test_terms_of_any_text_are_short_and_hold_no_white_space(text: str) -> None:
    assert all(term and len(term) <= MAX_TERM_CHARS and not any(c.isspace() for c in term) for term in terms(text))
