from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.retrieval.splitting import MAX_WORD_CHARS, SplitLimits, _weight, split_text

LIMITS = SplitLimits(max_weight=12, overlap=4)


def test_short_text_stays_whole() -> None:
    assert split_text("  One sentence. Another one.  ") == ["One sentence. Another one."]
    assert split_text(" \n ") == []


def test_long_text_is_cut_at_sentence_ends_with_overlap() -> None:
    text = "One two three four five six. Seven eight nine. Ten eleven twelve thirteen. Fourteen fifteen."
    assert split_text(text, LIMITS) == [
        "One two three four five six. Seven eight nine.",
        "Seven eight nine. Ten eleven twelve thirteen. Fourteen fifteen.",
    ]


def test_chinese_text_is_cut_at_its_sentence_ends() -> None:
    passages = split_text("一二三四五六七八九十。" * 90)
    assert len(passages) > 1
    assert all(len(passage) <= 460 and passage.endswith("。") for passage in passages)


def test_sentence_that_is_too_long_is_cut_between_words() -> None:
    passages = split_text(" ".join(f"word{n}" for n in range(40)), LIMITS)
    assert " ".join(passages).split() == [f"word{n}" for n in range(40)]


@given(st.lists(st.sampled_from(["alpha", "beta ", "退货", "。", ". ", "? ", "\n\n", "12.5 ", "x" * 50]), max_size=80))
def test_nothing_is_lost_and_no_passage_is_too_long(parts: list[str]) -> None:
    text = "".join(parts)
    passages = split_text(text, LIMITS)
    assert all(passage and _weight(passage, LIMITS) <= LIMITS.max_weight for passage in passages)
    place = 0
    for passage in passages:  # each begins at or before the end of the one before it, and the last one ends the text
        start = max(text.find(passage, max(place - len(passage), 0)), 0)
        assert not text[place:start].strip()
        place = max(place, start + len(passage))
    assert not text[place:].strip()


@pytest.mark.parametrize("text", ["word " * 181 + "。" * 100_000, "word " * 181 + "! " * 100_000, "退货" * 90_000])
def test_time_to_split_grows_with_the_text_alone(text: str) -> None:
    started = time.process_time()
    split_text(text)
    assert time.process_time() - started < 5  # with the square of it, minutes


@pytest.mark.parametrize("text", ["a" * 100_000, "-" * 100_000, "。" * 100_000, "a。" * 50_000])
def test_text_without_spaces_is_cut_too(text: str) -> None:
    passages = split_text(text)
    assert max(map(len, passages)) <= 180 * MAX_WORD_CHARS
    assert set("".join(passages)) == set(text)
