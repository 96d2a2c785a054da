"""The rules by which a log decides whose records count, each alone."""

from __future__ import annotations

import pytest

from schemas.errors import StreamGapError
from schemas.tokens import Choice, End, EndStatus, Epoch, FinishReason, Kind, See, TokenRecord
from streams.claims import StreamView
from streams.stream_events import StreamEnded, StreamReset, StreamSeen, TextAppended
from tests.streams.claim_records import E1, E2, claim, delta, end, feed, reset, sha, shown


def test_records_without_a_claim_are_ignored() -> None:
    view = StreamView()
    assert feed(view, delta(0, "ab")) == []
    assert view.is_orphaned


def test_the_claim_that_rides_on_the_first_record_opens_the_stream() -> None:
    view = StreamView()
    events = feed(view, delta(0, "ab", claim=True), delta(2, "c"), end(3, "abc"))
    assert [type(event) for event in events] == [TextAppended, TextAppended, StreamEnded]
    assert (view.text(), view.token_ids(), view.next_seq(), view.epoch, view.owner) == ("abc", (97, 98, 99), 3, E1, "a")
    assert not view.is_orphaned


def test_an_equal_epoch_of_another_owner_loses() -> None:
    view = StreamView()
    feed(view, delta(0, "ab", claim=True), delta(0, "xy", owner="b", claim=True), delta(2, "zz", owner="b"))
    assert (view.text(), view.owner) == ("ab", "a")


def test_a_greater_epoch_silences_the_earlier_owner() -> None:
    view = StreamView()
    feed(view, delta(0, "ab", claim=True), claim(E2, "b"), delta(2, "zz"), delta(2, "cd", epoch=E2, owner="b"))
    assert view.text() == "abcd"
    assert view.claim_offset == 1


def test_a_lower_epoch_that_wakes_late_does_not_count() -> None:
    view = StreamView()
    feed(view, delta(0, "ab", epoch=E2, owner="b", claim=True), delta(0, "xy", claim=True), end(2, None))
    assert (view.text(), view.is_ended) == ("ab", False)


def test_hop_counts_before_generation() -> None:
    view = StreamView()
    feed(view, claim(Epoch(0, 9), "a"), claim(Epoch(1, 0), "b"))
    assert view.owner == "b"


def test_a_claim_after_the_end_does_not_count() -> None:
    view = StreamView()
    events = feed(view, end(0, "", claim=True), delta(0, "x", epoch=E2, owner="b", claim=True), end(0, "", claim=True))
    assert [type(event) for event in events] == [StreamEnded]
    assert view.text() == ""


def test_a_claim_without_continuation_changes_nothing() -> None:
    view = StreamView()
    feed(view, delta(0, "ab", claim=True), claim(E2, "b"), claim(Epoch(0, 3), "c"))
    feed(view, delta(2, "c", epoch=Epoch(0, 3), owner="c"))
    assert view.text() == "abc"


def test_a_repeated_record_is_dropped() -> None:
    view = StreamView()
    first = delta(0, "ab", claim=True)
    assert shown(feed(view, first, first, delta(2, "c"), delta(2, "c"))) == {0: "abc"}


def test_a_repeated_record_without_tokens_is_dropped() -> None:
    view = StreamView()
    tail = delta(2, "!")
    feed(view, delta(0, "ab", claim=True), tail_without_tokens(tail), tail_without_tokens(tail), end(2, "ab!"))
    assert view.text() == "ab!"
    assert view.is_ended


def tail_without_tokens(record: TokenRecord) -> TokenRecord:
    return TokenRecord(kind=Kind.DELTA, epoch=record.epoch, owner=record.owner, seq=record.seq, text=record.text)


def test_a_missing_token_is_a_gap_and_leaves_the_view_as_it_was() -> None:
    view = StreamView()
    feed(view, delta(0, "ab", claim=True))
    with pytest.raises(StreamGapError):
        view.apply(delta(3, "d"), 1)
    assert feed(view, delta(2, "c")) == [TextAppended(index=0, text="c", token_ids=(99,))]


def test_an_end_that_counts_more_tokens_than_came_is_a_gap() -> None:
    view = StreamView()
    feed(view, delta(0, "ab", claim=True))
    with pytest.raises(StreamGapError):
        view.apply(end(3, "abc"), 1)
    assert not view.is_ended


def test_an_end_whose_hash_differs_is_a_gap() -> None:
    view = StreamView()
    feed(view, delta(0, "ab", claim=True))
    with pytest.raises(StreamGapError):
        view.apply(end(2, "aX"), 1)


def test_equal_repetition_by_a_new_owner_stays_invisible() -> None:
    view = StreamView()
    events = feed(
        view,
        delta(0, "ab", claim=True),
        delta(2, "cd"),
        delta(0, "abc", epoch=E2, owner="b", claim=True),
        delta(3, "de", epoch=E2, owner="b"),
        end(5, "abcde", epoch=E2, owner="b"),
    )
    assert not any(isinstance(event, StreamReset) for event in events)
    assert shown(events) == {0: "abcde"}


def test_different_repetition_surfaces_as_reset_and_the_new_text() -> None:
    view = StreamView()
    events = feed(
        view,
        delta(0, "abcd", claim=True),
        delta(0, "ab", epoch=E2, owner="b", claim=True),
        delta(2, "xy", epoch=E2, owner="b"),
    )
    assert events[1:] == [StreamReset(index=0), TextAppended(index=0, text="abxy", token_ids=(97, 98, 120, 121))]


def test_a_shorter_repetition_surfaces_at_the_end() -> None:
    view = StreamView()
    new = delta(0, "ab", epoch=E2, owner="b", claim=True)
    events = feed(view, delta(0, "abcd", claim=True), new, end(2, "ab", epoch=E2, owner="b"))
    assert shown(events) == {0: "ab"}
    assert [type(event) for event in events[1:]] == [StreamReset, TextAppended, StreamEnded]


def test_an_end_without_text_leaves_the_text_that_stands() -> None:
    view = StreamView()
    events = feed(view, delta(0, "ab", claim=True), end(0, None, epoch=E2, owner="b", claim=True))
    assert shown(events) == {0: "ab"}
    assert view.is_ended


def test_a_successor_may_only_end() -> None:
    view = StreamView()
    feed(view, delta(0, "ab", claim=True), claim(E2, "b"), end(2, "ab", epoch=E2, owner="b"))
    assert view.is_ended


def test_reset_clears_all_choices_and_restarts_seq() -> None:
    view = StreamView()
    events = feed(
        view,
        delta(0, "ab", claim=True),
        delta(0, "cd", index=1),
        reset(4),
        reset(4),
        delta(0, "x"),
        delta(0, "y", index=1),
    )
    assert events[2:4] == [StreamReset(index=0), StreamReset(index=1)]
    assert shown(events) == {0: "x", 1: "y"}


def test_a_late_repeat_of_a_reset_voids_nothing() -> None:
    view = StreamView()
    feed(view, delta(0, "ab", claim=True), reset(2), delta(0, "xyz"))
    assert feed(view, reset(2), delta(0, "xyz")) == []
    assert view.text() == "xyz"


def test_a_run_may_begin_with_a_reset() -> None:
    view = StreamView()
    events = feed(view, delta(0, "ab", claim=True), claim(E2, "b"), reset(2, epoch=E2, owner="b"))
    assert events[1:] == [StreamReset(index=0)]
    assert feed(view, delta(0, "x", epoch=E2, owner="b")) == [TextAppended(index=0, text="x", token_ids=(120,))]


def test_a_reset_before_any_text_does_no_harm() -> None:
    view = StreamView()
    events = feed(view, claim(E1, "a"), reset(0), delta(0, "x"), end(1, "x"))
    assert events[0] == TextAppended(index=0, text="x", token_ids=(120,))
    assert view.is_ended


def test_retract_withdraws_text_and_keeps_the_count() -> None:
    view = StreamView()
    take_back = TokenRecord(kind=Kind.RETRACT, epoch=E1, owner="a", seq=4, text="cd")
    events = feed(view, delta(0, "abcd", claim=True), take_back, take_back, delta(4, "e"), end(5, "abe"))
    assert shown(events) == {0: "abe"}
    assert view.next_seq() == 5


def test_choices_are_counted_and_checked_apart() -> None:
    view = StreamView()
    choices = tuple(
        Choice(index=i, finish_reason=FinishReason.STOP, num_tokens=len(text), sha256=sha(text))
        for i, text in ((0, "ab"), (1, "xyz"))
    )
    last = TokenRecord(
        kind=Kind.END,
        epoch=E1,
        owner="a",
        seq=2,
        end=End(status=EndStatus.COMPLETED, finish_reason=FinishReason.STOP, choices=choices),
    )
    feed(view, delta(0, "a", claim=True), delta(0, "xy", index=1), delta(1, "b"))
    with pytest.raises(StreamGapError):
        view.apply(last, 3)
    feed(view, delta(2, "z", index=1), last)
    assert view.is_ended
    assert view.indexes == (0, 1)


def test_see_passes_only_before_a_claim_counts() -> None:
    view = StreamView()
    see = See(topic="t", partition=1, offset=7)
    record = TokenRecord(kind=Kind.SEE, epoch=E1, owner="r", see=see)
    assert feed(view, record) == [StreamSeen(see=see)]
    assert feed(view, delta(0, "a", claim=True), record) == [TextAppended(index=0, text="a", token_ids=(97,))]
