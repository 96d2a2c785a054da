from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from workers.generation.engine.detokenizer import Detokenizer, StopFilter

HARD_TEXT = "🌶️ 你好 é👨‍👩‍👧"


def test_text_byte_by_byte_equals_the_whole_and_every_piece_is_valid() -> None:
    detokenizer = Detokenizer()
    pieces = [detokenizer.push(bytes([byte])) for byte in HARD_TEXT.encode()]
    assert "".join(pieces) + detokenizer.flush() == HARD_TEXT
    assert "�" not in "".join(pieces)


def test_unfinished_character_is_flushed_as_the_full_decode_shows_it() -> None:
    raw = "ok é".encode()[:-1]
    detokenizer = Detokenizer()
    text = "".join(detokenizer.push(bytes([byte])) for byte in raw)
    assert text == "ok "
    assert text + detokenizer.flush() == raw.decode("utf-8", "replace")


@given(st.binary(max_size=40), st.lists(st.integers(0, 40)))
def test_any_bytes_cut_anywhere_equal_the_full_decode(raw: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    detokenizer = Detokenizer()
    text = "".join(detokenizer.push(raw[a:b]) for a, b in pairwise(places))
    assert text + detokenizer.flush() == raw.decode("utf-8", "replace")


def test_stop_string_over_several_pieces_is_never_published_in_part() -> None:
    stop = StopFilter(["<END>"])
    pieces = [stop.push(piece) for piece in ("Hi <", "E", "ND", ">", " more")]
    assert pieces == ["Hi ", "", "", "", ""]
    assert stop.matched == "<END>"
    assert stop.flush() == ""


def test_what_only_looked_like_a_stop_string_is_released_at_once() -> None:
    stop = StopFilter(["<END>"])
    assert stop.push("a <EN") == "a "
    assert stop.push("JOY") == "<ENJOY"


def test_only_the_longest_open_suffix_is_held_back() -> None:
    stop = StopFilter(["abc", "bd"])
    assert stop.push("xxab") == "xx"
    assert stop.push("b") == "ab"
    assert stop.flush() == "b"


def test_stop_string_that_is_complete_first_wins() -> None:
    stop = StopFilter(["abcd", "bc"])
    assert stop.push("xabcd") == "xa"
    assert stop.matched == "bc"


@given(
    st.text("ab<>", max_size=30),
    st.lists(st.text("ab<>", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 30)),
)
def test_filter_gives_the_same_text_however_it_is_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    whole = StopFilter(stops)
    expected = whole.push(text) + whole.flush()
    cut_filter, published = StopFilter(stops), ""
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    for start, end in pairwise(places):
        published += cut_filter.push(text[start:end])
        assert not any(stop in published for stop in stops)
        assert expected.startswith(published)
    assert published + cut_filter.flush() == expected
    assert cut_filter.matched == whole.matched
