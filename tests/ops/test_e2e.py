"""What counts as an answer with its fact, and what suffices."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ops.e2e import Outcome, Question, carries_fact, load_questions, measure_all, write_outcomes
from ops.errors import CommandError
from ops.percentile import percentile


def question(language: str = "en", split: str = "tuning", number: int = 1) -> Question:
    return Question(
        id=f"q-{language}-{number}",
        language=language,
        question="How long?",
        passage_id="returns",
        fact=("30 days",),
        split=split,
    )


def good(asked: Question, ttft_ms: float = 100.0) -> Outcome:
    return Outcome(
        question=asked, answer="You have 30 days.", passage_ids=("other", "returns"), has_ended=True, ttft_ms=ttft_ms
    )


@pytest.mark.parametrize(
    ("answer", "spellings", "expected"),
    [
        ("You have 30 days.", ("30 days",), True),
        ("You have 30\n   DAYS.", ("30 days",), True),
        ("Thirty Days it is", ("30 days", "thirty days"), True),
        ("您有30天时间", ("30天", "三十天"), True),
        ("You have 3 days.", ("30 days",), False),
        ("", ("30 days",), False),
        ("anything", (), False),
    ],
)
def test_fact_is_found_in_any_accepted_spelling(answer: str, spellings: tuple[str, ...], expected: bool) -> None:
    assert carries_fact(answer, spellings) is expected


def test_shipped_questions_can_be_read_and_narrowed() -> None:
    everything = load_questions()
    assert {each.language for each in everything} == {"en", "zh"}
    held_out = load_questions(split="held_out")
    assert 0 < len(held_out) < len(everything)
    assert [each.language for each in load_questions(limit=2)] == ["en", "en", "zh", "zh"]


def test_broken_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "questions.jsonl"
    path.write_text('{"id": "x"}\n')
    with pytest.raises(CommandError, match="line 1"):
        load_questions(path)


def test_numbers_are_given_over_all_by_language_and_by_split() -> None:
    outcomes = [
        good(question(), 100),
        good(question(split="held_out"), 300),
        Outcome(question=question("zh"), passage_ids=("returns",), has_ended=True, ttft_ms=200),
    ]
    numbers = measure_all(outcomes)
    assert (numbers["questions"], numbers["ended"]) == (3, 3)
    assert numbers["retrieval_hit_rate"] == 1.0
    assert numbers["answer_fact_rate"] == pytest.approx(0.6667)
    assert numbers["ttft_ms"] == {"p50": 200, "p99": 300}
    assert numbers["languages"]["zh"]["answer_fact_rate"] == 0.0
    assert numbers["splits"]["held_out"]["questions"] == 1
    assert not numbers["passed"]
    assert numbers["misses"] == ["zh: answer_fact_rate 0.0 is below 0.7"]


def test_request_that_did_not_end_is_a_miss_whatever_the_rates() -> None:
    outcomes = [good(question(number=number)) for number in range(99)]
    outcomes.append(Outcome(question=question(number=99), failure="response_timeout"))
    numbers = measure_all(outcomes)
    assert numbers["misses"] == ["1 of 100 requests did not end"]


def test_no_question_at_all_does_not_pass() -> None:
    assert not measure_all([])["passed"]


@given(st.lists(st.floats(min_value=0, max_value=1e6), min_size=1), st.sampled_from([0.5, 0.9, 0.99, 1.0]))
def test_percentile_is_a_value_that_so_many_do_not_exceed(values: list[float], share: float) -> None:
    found = percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)


def test_outcomes_are_written_one_a_line(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    write_outcomes(path, [good(question()), good(question("zh"))])
    assert len(path.read_text().splitlines()) == 2
