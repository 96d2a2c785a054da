"""The offset tracker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from streams.offsets import OffsetTracker


def test_nothing_is_committable_before_something_is_finished() -> None:
    tracker = OffsetTracker()
    assert tracker.committable() is None
    tracker.start(7)
    assert tracker.committable() is None
    assert tracker.finish(7)
    assert tracker.committable() == 8


def test_gaps_of_compaction_do_not_block() -> None:
    tracker = OffsetTracker()
    for offset in (3, 9, 40):
        tracker.start(offset)
    tracker.finish(9)
    tracker.finish(3)
    assert tracker.committable() == 10
    assert tracker.span == 1
    tracker.finish(40)
    assert tracker.committable() == 41
    assert tracker.span == 0


def test_an_unknown_offset_is_neither_running_nor_finished_and_cannot_finish() -> None:
    tracker = OffsetTracker()
    tracker.start(5)
    assert not tracker.finish(4)
    assert not tracker.is_running(4)
    assert not tracker.is_finished(4)
    assert tracker.committable() is None


def test_starting_again_changes_nothing() -> None:
    tracker = OffsetTracker()
    assert tracker.start(1)
    assert not tracker.start(1)
    tracker.finish(1)
    assert not tracker.start(1)
    assert tracker.num_running == 0
    assert tracker.is_finished(1)


def test_an_older_record_that_comes_late_holds_the_commit_back() -> None:
    tracker = OffsetTracker()
    tracker.start(5)
    tracker.finish(5)
    tracker.start(2)
    assert tracker.committable() == 2
    tracker.finish(2)
    assert tracker.committable() == 6


@given(st.sets(st.integers(0, 200), min_size=1), st.data())
def test_commit_never_passes_an_unfinished_offset_and_skips_none(received: set[int], data: st.DataObject) -> None:
    tracker = OffsetTracker()
    for offset in sorted(received):
        tracker.start(offset)
    finished: set[int] = set()
    for offset in data.draw(st.permutations(sorted(received))):
        finished.add(offset)
        assert tracker.finish(offset)
        assert not tracker.finish(offset)
        unfinished = received - finished
        committable = tracker.committable()
        below = [o for o in sorted(received) if o < min(unfinished, default=10**9)]
        assert committable == (below[-1] + 1 if below else None), "neither repeats n nor skips n + 1"
        assert all(tracker.is_finished(o) for o in finished)
        assert all(tracker.is_running(o) and not tracker.is_finished(o) for o in unfinished)
        assert tracker.num_running == len(unfinished)
        assert tracker.span == (max(received) - min(unfinished) + 1 if unfinished else 0)


@given(st.lists(st.tuples(st.sampled_from(["start", "finish"]), st.integers(0, 20))))
def test_any_order_of_events_keeps_the_commit_below_what_runs(events: list[tuple[str, int]]) -> None:
    tracker = OffsetTracker()
    running: set[int] = set()
    for what, offset in events:
        if what == "start":
            if not tracker.is_finished(offset):
                running.add(offset)
            tracker.start(offset)
        else:
            assert tracker.finish(offset) == (offset in running)
            running.discard(offset)
        committable = tracker.committable()
        assert committable is None or not running or committable <= min(running)
