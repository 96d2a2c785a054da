from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workers.intent.language import detect_language, resolve_language


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("How do I return shoes?", "en"),
        ("怎么退货", "zh"),
        ("iPhone 壳可以退吗，谢谢", "zh"),
        ("鲜の每日果汁店今天几点开门", "zh"),
        ("返品方法を教えてください", "ja"),
        ("신발을 반품하고 싶어요", "ko"),
        ("Как вернуть обувь?", "ru"),
        ("", "en"),
        ("12345 ???", "en"),
    ],
)
def test_the_script_with_most_words_decides(text: str, language: str) -> None:
    assert detect_language(text) == language


def test_a_requested_language_wins_over_the_script() -> None:
    assert resolve_language("zh-Hans-CN", "hello") == "zh"
    assert resolve_language("DE", "hello") == "de"


def test_a_request_that_is_no_language_tag_falls_back_to_the_script() -> None:
    assert resolve_language("english", "你好") == "zh"
    assert resolve_language(None, "你好") == "zh"


@given(st.text())
def test_any_text_gets_two_lower_case_letters(text: str) -> None:
    language = detect_language(text)
    assert len(language) == 2 and language.isascii() and language.islower()
