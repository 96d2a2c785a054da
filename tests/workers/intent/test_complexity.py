from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from workers.intent.complexity import complexity

_PIECES = st.lists(st.sampled_from(["shoes", "and", "if", "how", "12", "why,", "退货", "而且", "。", "x"]), max_size=60)


@given(_PIECES, _PIECES)
def test_appending_text_never_lowers_the_score(first: list[str], more: list[str]) -> None:
    assert complexity(" ".join(first)) <= complexity(" ".join([*first, *more])) + 1e-12


@given(st.text(max_size=400))
def test_the_score_lies_between_0_and_1(text: str) -> None:
    assert 0 <= complexity(text) < 1


def test_a_plain_question_is_simple_and_a_conditional_one_is_not() -> None:
    hard = (
        "If I bought 3 pairs on May 5 and 2 of them don't fit, but the third was a gift, how do I return the two, "
        "what does it cost, and when do I get the money back, or can I exchange them instead?"
    )
    assert complexity("How do I return shoes?") < 0.3
    assert complexity("怎么退货？") < 0.3
    assert complexity(hard) > 0.5
    assert complexity("") == 0
