"""Each defect that a log can have is put into one, and the checker finds it; a sound log passes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from ops.bench.chaos.checker import (
    Audit,
    Entry,
    Expected,
    Fault,
    Received,
    Seen,
    check_commits,
    check_memory,
    check_request,
    end_place,
    is_answered_again,
)
from schemas.tokens import EndStatus, FinishReason
from streams.broker import TopicPartition
from tests.ops.bench.chaos.logs import (
    EXPECTED,
    TEXT,
    claim,
    delta,
    end,
    log,
    reset,
    seen,
    taken_over,
    undisturbed,
)

PLACE = TopicPartition("gea.generation.blue", 0)


def faults(entries: Sequence[Entry], saw: Seen | None = None, expected: Expected = EXPECTED) -> list[Fault]:
    return [problem.fault for problem in check_request("r", entries, expected, saw)]


@pytest.mark.parametrize("entries", [undisturbed(), taken_over()], ids=["undisturbed", "taken over"])
def test_a_sound_log_has_no_problem(entries: list[Entry]) -> None:
    assert faults(entries, seen(entries)) == []


def test_what_a_stale_owner_writes_after_a_take_over_is_no_problem_while_nobody_sees_it() -> None:
    entries = log(
        delta(1, 0, "hello", is_first=True),
        claim(2),
        delta(1, 5, " zombie"),
        delta(2, 5, " there"),
        end(2, 3),
        end(1, 3),
    )
    assert faults(entries, seen(entries)) == []


def test_a_late_claim_behind_the_end_is_no_problem() -> None:
    entries = log(*(entry.record for entry in undisturbed()), claim(2))
    assert faults(entries, seen(entries)) == []


def test_a_request_without_any_record_is_lost() -> None:
    assert faults([]) == [Fault.LOST]


def test_a_stream_without_an_end_is_lost() -> None:
    assert faults(undisturbed()[:-1]) == [Fault.LOST]


def test_an_end_of_a_stale_epoch_alone_is_lost() -> None:
    assert faults(log(delta(1, 0, "hello", is_first=True), claim(2), end(1, 2))) == [Fault.LOST]


def test_a_reader_without_an_end_is_lost() -> None:
    assert faults(undisturbed(), Seen(request_id="r", failure="timeout")) == [Fault.LOST]


def test_a_missing_token_is_found_as_a_gap() -> None:
    assert Fault.ALTERED in faults(log(delta(1, 0, "hel", is_first=True), delta(1, 5, " there"), end(1, 3)))


def test_a_text_that_differs_from_the_undisturbed_one_is_altered() -> None:
    assert Fault.ALTERED in faults(log(delta(1, 0, "hallo there", is_first=True), end(1, 2, text="hallo there")))


def test_an_answer_that_is_shorter_is_altered() -> None:
    entries = log(delta(1, 0, "hello", is_first=True), end(1, 2, text="hello", num_tokens=5))
    assert Fault.ALTERED in faults(entries)


def test_token_ids_that_spell_the_same_text_are_compared_too() -> None:
    other = Expected(texts=(TEXT,), token_ids=((1, 2, 3),), reasons=(FinishReason.STOP,), prompt_tokens=7)
    assert faults(undisturbed(), expected=other) == [Fault.ALTERED]


def test_a_reset_that_a_reader_saw_is_altered_even_if_the_text_comes_out_right() -> None:
    entries = log(delta(1, 0, "hel", is_first=True), claim(2), reset(2, 3), delta(2, 0, TEXT), end(2, 4))
    assert faults(entries) == []
    assert faults(entries, seen(entries, num_resets=1)) == [Fault.ALTERED]


@pytest.mark.parametrize(
    "wrong",
    [
        end(1, 3, prompt_tokens=8),
        end(1, 3, num_tokens=len(TEXT) - 1),
        end(1, 3, reason=FinishReason.LENGTH),
        end(1, 4),
    ],
    ids=["prompt tokens", "completion tokens", "finish reason", "number of records"],
)
def test_a_wrong_end_is_altered(wrong: object) -> None:
    entries = undisturbed()[:-1]
    records = [entry.record for entry in entries]
    assert Fault.ALTERED in faults(log(*records, wrong))  # type: ignore[arg-type]


def test_a_hash_that_is_not_of_the_text_is_altered() -> None:
    entries = log(delta(1, 0, TEXT, is_first=True), end(1, 2, text="another"))
    assert Fault.ALTERED in faults(entries)


def test_a_request_that_failed_is_altered() -> None:
    assert faults(
        log(claim(1), end(1, 2, text="", num_tokens=0, status=EndStatus.FAILED, reason=FinishReason.ERROR))
    ) == [Fault.ALTERED]


def test_a_second_answer_that_no_reader_sees_is_counted_and_no_problem() -> None:
    entries = log(*(entry.record for entry in undisturbed()), claim(2), delta(2, 0, TEXT), end(2, 3))
    assert faults(entries, seen(undisturbed())) == []
    assert is_answered_again(entries)
    assert not is_answered_again(undisturbed())
    assert not is_answered_again(taken_over())


def test_a_record_that_was_written_twice_counts_once() -> None:
    entries = log(delta(1, 0, "hello", is_first=True), delta(1, 5, " there"), delta(1, 5, " there"), end(1, 3))
    assert faults(entries, seen(entries)) == []


def test_a_reader_with_two_ends_is_doubled() -> None:
    assert faults(undisturbed(), seen(undisturbed(), num_ends=2)) == [Fault.DUPLICATED]


def test_a_reader_that_got_tokens_twice_is_doubled() -> None:
    assert faults(undisturbed(), seen(undisturbed(), text="hellohello there")) == [Fault.DUPLICATED]


def test_a_reader_that_got_a_stale_owners_text_is_altered() -> None:
    entries = log(
        delta(1, 0, "hello", is_first=True), claim(2), delta(1, 5, " zombi"), delta(2, 5, " there"), end(2, 3)
    )
    assert faults(entries, seen(entries, text="hello zombi")) == [Fault.ALTERED]


def test_a_reader_whose_end_is_not_the_logs_is_altered() -> None:
    other = log(delta(1, 0, TEXT, is_first=True), end(1, 2))
    assert faults(undisturbed(), seen(other)) == [Fault.ALTERED]


def test_every_choice_is_compared() -> None:
    both = Expected(
        texts=("a", "b"),
        token_ids=((97,), (98,)),
        reasons=(FinishReason.STOP, FinishReason.STOP),
        prompt_tokens=7,
    )
    entries = log(delta(1, 0, "a", is_first=True), end(1, 2, text="a", num_tokens=1))
    assert Fault.ALTERED in faults(entries, expected=both)


def received(*, is_handed_on: bool = False) -> list[Received]:
    return [Received(place=PLACE, offset=4, request_id="r", is_handed_on=is_handed_on)]


def audit(committed: int, token_end: int) -> Audit:
    return Audit(group="g", committed={PLACE: committed}, token_ends={0: token_end})


def test_a_record_committed_before_its_end_is_lost() -> None:
    ends = {"r": (0, 10)}
    assert [problem.fault for problem in check_commits(received(), audit(5, 10), ends)] == [Fault.LOST]
    assert [problem.fault for problem in check_commits(received(), audit(5, 10), {})] == [Fault.LOST]


@pytest.mark.parametrize(("committed", "token_end"), [(4, 0), (5, 11)], ids=["not committed", "ended before"])
def test_a_commit_behind_the_end_is_sound(committed: int, token_end: int) -> None:
    assert check_commits(received(), audit(committed, token_end), {"r": (0, 10)}) == []


@pytest.mark.parametrize(("elsewhere", "expected"), [(7, []), (8, [Fault.LOST, Fault.LOST])], ids=["held", "committed"])
def test_a_request_is_lost_only_once_all_its_copies_are_committed(elsewhere: int, expected: list[Fault]) -> None:
    other = TopicPartition("t", 1)
    copies = [*received(), Received(place=other, offset=7, request_id="r")]
    looked = Audit(group="g", committed={PLACE: 5, other: elsewhere}, token_ends={0: 10})
    assert [problem.fault for problem in check_commits(copies, looked, {"r": (0, 10)})] == expected


def test_a_record_that_was_handed_on_may_be_committed_before_its_end() -> None:
    assert check_commits(received(is_handed_on=True), audit(5, 0), {}) == []


def test_the_place_of_an_end_is_that_of_the_effective_one() -> None:
    assert end_place(taken_over()) == (0, 3)
    assert end_place(undisturbed()[:-1]) is None


@pytest.mark.parametrize(
    ("memory", "is_sound"),
    [
        ((), True),
        ((("q1", "a1"), ("q2", "a2")), True),
        ((("q2", "a2"),), True),
        ((("q2", "a2"), ("q1", "a1")), False),
        ((("q1", "another"),), False),
        ((("q1", "a1"), ("q1", "a1")), False),
    ],
)
def test_memory_is_turns_that_were_in_their_order(memory: tuple[tuple[str, str], ...], is_sound: bool) -> None:
    assert (check_memory("r", memory, (("q1", "a1"), ("q2", "a2"))) == []) is is_sound
