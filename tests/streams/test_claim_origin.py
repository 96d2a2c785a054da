"""What the text of a stream was made from, as its claims tell it."""

from __future__ import annotations

import msgspec

from schemas.tokens import Claim, TokenRecord
from streams.claims import StreamView
from tests.streams.claim_records import E2, claim, delta, feed, reset

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
