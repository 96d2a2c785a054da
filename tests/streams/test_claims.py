"""The rules by which a log decides: each alone, then random schedules of owners that die, pause and wake."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.errors import StreamGapError
from schemas.tokens import (
    Choice,
    Claim,
    End,
    EndStatus,
    Epoch,
    FinishReason,
    Kind,
    See,
    TokenRecord,
)
from streams.claims import StreamView
from streams.stream_events import Event, StreamEnded, StreamReset, StreamSeen, TextAppended, TextRetracted

E1, E2 = Epoch(0, 1), Epoch(0, 2)


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def delta(
    seq: int, text: str, *, epoch: Epoch = E1, owner: str = "a", claim: bool = False, index: int = 0, tokens: int = -1
) -> TokenRecord:
    """A delta with one token per character."""
    ids = tuple(ord(c) for c in text) if tokens < 0 else tuple(range(tokens))
    return TokenRecord(
        kind=Kind.DELTA,
        epoch=epoch,
        owner=owner,
        index=index,
        seq=seq,
        text=text,
        token_ids=ids,
        claim=Claim() if claim else None,
    )


def claim(epoch: Epoch, owner: str) -> TokenRecord:
    return TokenRecord(kind=Kind.CLAIM, epoch=epoch, owner=owner, claim=Claim())


def end(seq: int, text: str | None, *, epoch: Epoch = E1, owner: str = "a", claim: bool = False) -> TokenRecord:
    digest = "" if text is None else sha(text)
    return TokenRecord(
        kind=Kind.END,
        epoch=epoch,
        owner=owner,
        seq=seq,
        end=End(status=EndStatus.COMPLETED, finish_reason=FinishReason.STOP, sha256=digest),
        claim=Claim() if claim else None,
    )


def reset(seq: int, *, epoch: Epoch = E1, owner: str = "a") -> TokenRecord:
    return TokenRecord(kind=Kind.RESET, epoch=epoch, owner=owner, seq=seq)


def feed(view: StreamView, *records: TokenRecord) -> list[Event]:
    return [event for offset, record in enumerate(records) for event in view.apply(record, offset)]


def shown(events: list[Event]) -> dict[int, str]:
    """What somebody sees who only follows the events."""
    texts: dict[int, str] = {}
    for event in events:
        match event:
            case TextAppended():
                texts[event.index] = texts.get(event.index, "") + event.text
            case TextRetracted():
                assert texts[event.index].endswith(event.text)
                texts[event.index] = texts[event.index].removesuffix(event.text)
            case StreamReset():
                texts[event.index] = ""
    return texts


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


PLANNED = Claim(model="m", plan="p", memory=(("q", "a"),))


def described(record: TokenRecord, claim: Claim = PLANNED) -> TokenRecord:
    return msgspec.structs.replace(record, claim=claim)


def test_the_claim_on_the_first_text_says_what_it_was_made_from() -> None:
    view = StreamView()
    feed(view, described(delta(0, "ab")), delta(0, "x", index=1))
    assert view.origin == PLANNED


def test_a_text_whose_run_said_nothing_has_no_origin() -> None:
    view = StreamView()
    assert view.origin is None
    feed(view, delta(0, "ab", claim=True))
    assert view.origin is None


def test_who_takes_over_and_continues_leaves_the_origin_as_it_is() -> None:
    view = StreamView()
    feed(view, described(delta(0, "ab")), claim(E2, "b"), delta(2, "c", epoch=E2, owner="b"))
    assert (view.text(), view.origin) == ("abc", PLANNED)


def test_a_choice_that_a_successor_begins_has_the_origin_that_he_says_again() -> None:
    view = StreamView()
    again = described(delta(0, "x", epoch=E2, owner="b", index=1))
    feed(view, described(delta(0, "ab")), claim(E2, "b"), again)
    assert view.origin == PLANNED


def test_choices_of_different_plans_have_no_common_origin() -> None:
    view = StreamView()
    other = described(delta(0, "x", epoch=E2, owner="b", index=1), Claim(plan="other"))
    feed(view, described(delta(0, "ab")), claim(E2, "b"), other)
    assert view.origin is None


def test_a_reset_voids_the_origin_until_it_is_told_again() -> None:
    view = StreamView()
    feed(view, described(delta(0, "ab")), reset(2), delta(0, "x"))
    assert [view.origin] == [None]
    other = Claim(plan="other")
    feed(view, reset(1), described(delta(0, "y"), other))
    assert view.origin == other
    feed(view, described(reset(1)), delta(0, "z"))
    assert view.origin == PLANNED


def test_a_repetition_from_the_middle_has_the_origin_of_the_text_that_it_joins() -> None:
    view = StreamView()
    feed(view, described(delta(0, "ab")), delta(2, "cd"), claim(E2, "b"))
    feed(view, delta(2, "cd", epoch=E2, owner="b"), delta(4, "e", epoch=E2, owner="b"))
    assert (view.text(), view.origin) == ("abcde", PLANNED)


def test_the_origin_of_a_repetition_counts_once_it_is_what_readers_see() -> None:
    view, other = StreamView(), Claim(plan="other")
    feed(view, described(delta(0, "abcd")), described(delta(0, "ab", epoch=E2, owner="b"), other))
    assert view.origin == PLANNED
    feed(view, delta(2, "cde", epoch=E2, owner="b"))
    assert (view.text(), view.origin) == ("abcde", other)


# Random schedules.

LENGTH = 12


@dataclass
class Owner:
    """A run that writes LENGTH tokens. `salt` makes its tokens differ from those of other owners."""

    name: str
    epoch: Epoch
    is_takeover: bool
    salt: str = ""
    tokens: list[str] = field(default_factory=list)
    is_open: bool = False
    is_done: bool = False

    def step(self, log: list[TokenRecord], size: int, copies: int) -> None:
        """Write the next record of this run, `copies` times."""
        if self.is_done:
            return
        if self.is_takeover and not self.is_open:
            log.extend([claim(self.epoch, self.name)] * copies)
            view = StreamView()
            feed(view, *log)
            self.is_open = True
            self.is_done = view.is_ended or not view.is_owned_by(self.epoch, self.name)
            self.tokens = [chr(token) for token in view.token_ids()]
            return
        is_first, self.is_open = not self.is_open, True
        if len(self.tokens) == LENGTH:
            log.extend([end(LENGTH, "".join(self.tokens), epoch=self.epoch, owner=self.name, claim=is_first)] * copies)
            self.is_done = True
            return
        seq = len(self.tokens)
        text = "".join(
            (self.salt or chr(97 + at)) if at % 3 == 2 else chr(97 + at) for at in range(seq, min(seq + size, LENGTH))
        )
        self.tokens += text
        log.extend([delta(seq, text, epoch=self.epoch, owner=self.name, claim=is_first)] * copies)


def check(log: list[TokenRecord]) -> str:
    """Read the log as a client does, and compare what it sees with the view."""
    view = StreamView()
    events = feed(view, *log)
    assert sum(isinstance(event, StreamEnded) for event in events) == 1
    assert isinstance(events[-1], StreamEnded)
    assert shown(events).get(0, "") == view.text()
    assert view.next_seq() == len(view.text()) == LENGTH
    return view.text()


owners = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 3), st.booleans()), min_size=1, max_size=4)
schedule = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 2)), max_size=40)


def play(drawn: list[tuple[int, int, bool]], steps: list[tuple[int, int, int]], *, is_salted: bool) -> str:
    """Let the owners write in the drawn order (who is not drawn again has died), then a last one finishes."""
    actors = [
        Owner(f"o{i}", Epoch(hop // 3, generation), is_takeover, chr(65 + i) if is_salted else "")
        for i, (hop, generation, is_takeover) in enumerate(drawn)
    ]
    log: list[TokenRecord] = []
    for who, size, copies in steps:
        actors[who % len(actors)].step(log, size, copies)
    last = Owner("last", Epoch(9, 9), True, "Z" if is_salted else "")
    while not last.is_done:
        last.step(log, 3, 1)
    for actor in actors:  # paused ones wake after the end
        actor.step(log, 2, 1)
    return check(log)


@given(owners, schedule)
@settings(max_examples=400, deadline=None)
def test_reproducible_text_is_whole_whatever_the_owners_do(
    drawn: list[tuple[int, int, bool]], steps: list[tuple[int, int, int]]
) -> None:
    assert play(drawn, steps, is_salted=False) == "".join(chr(97 + at) for at in range(LENGTH))


@given(owners, schedule)
@settings(max_examples=400, deadline=None)
def test_text_that_cannot_be_reproduced_still_ends_once_without_a_gap(
    drawn: list[tuple[int, int, bool]], steps: list[tuple[int, int, int]]
) -> None:
    text = play(drawn, steps, is_salted=True)
    assert [c for at, c in enumerate(text) if at % 3 != 2] == [chr(97 + at) for at in range(LENGTH) if at % 3 != 2]
