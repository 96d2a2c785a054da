"""What of a run's stream is new to readers, however its chunks are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from schemas.tokens import Claim, Epoch, Kind, TokenLogprob, TokenRecord
from streams.claims import StreamView
from workers.generation.engine import TokenChunk
from workers.generation.replay import Replay

WHOLE = "it says héllo"


def seen(text: str, token_ids: tuple[int, ...], index: int = 0) -> StreamView:
    view = StreamView()
    record = TokenRecord(
        kind=Kind.DELTA, epoch=Epoch(0, 1), owner="a", index=index, text=text, token_ids=token_ids, claim=Claim()
    )
    view.apply(record, 0)
    return view


def ids(text: str) -> tuple[int, ...]:
    return tuple(ord(character) for character in text)


def cut(text: str, places: list[int]) -> list[TokenChunk]:
    borders = [0, *sorted(places), len(text)]
    pieces = [text[start:stop] for start, stop in pairwise(borders)]
    return [TokenChunk(text=piece, token_ids=ids(piece)) for piece in pieces]


@given(st.integers(0, len(WHOLE)), st.lists(st.integers(0, len(WHOLE)), max_size=6))
def test_seen_and_new_make_the_whole_wherever_both_are_cut(known: int, places: list[int]) -> None:
    replay = Replay(seen(WHOLE[:known], ids(WHOLE[:known])))
    new = [rest for chunk in cut(WHOLE, places) if (rest := replay.rest(chunk)) is not None]
    assert (replay.has_diverged, replay.is_complete) == (False, True)
    assert "".join(chunk.text for chunk in new) == WHOLE[known:]
    assert tuple(token for chunk in new for token in chunk.token_ids) == ids(WHOLE[known:])


@given(st.integers(1, len(WHOLE)), st.data())
def test_any_other_token_is_noticed(known: int, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, known - 1))
    other = f"{WHOLE[:at]}#{WHOLE[at + 1 :]}"
    replay = Replay(seen(WHOLE[:known], ids(WHOLE[:known])))
    for chunk in cut(other, []):
        replay.rest(chunk)
    assert replay.has_diverged


def test_the_same_tokens_with_another_text_are_noticed() -> None:
    replay = Replay(seen("ab", (1, 2)))
    assert replay.rest(TokenChunk(text="aX", token_ids=(1, 2))) is None
    assert replay.has_diverged


def test_text_may_come_later_than_its_tokens() -> None:
    replay = Replay(seen("a", (1, 2, 3)))
    chunks = [
        TokenChunk(text="", token_ids=(1,)),
        TokenChunk(text="ab", token_ids=(2, 3)),
        TokenChunk(text="c", token_ids=(4,)),
    ]
    assert [replay.rest(chunk) for chunk in chunks] == [
        None,
        TokenChunk(text="b", token_ids=()),
        TokenChunk(text="c", token_ids=(4,)),
    ]


def test_text_without_tokens_at_the_end_is_known_by_its_characters() -> None:
    replay = Replay(seen("ab!", (1, 2)))
    assert replay.rest(TokenChunk(text="ab", token_ids=(1, 2))) is None
    assert not replay.is_complete
    assert replay.rest(TokenChunk(text="!", token_ids=())) is None
    assert replay.is_complete


def test_logprobs_go_with_their_tokens() -> None:
    found = tuple(TokenLogprob(token_id=token, logprob=-1.0) for token in (1, 2, 3))
    replay = Replay(seen("ab", (1, 2)))
    rest = replay.rest(TokenChunk(text="abc", token_ids=(1, 2, 3), logprobs=found))
    assert rest == TokenChunk(text="c", token_ids=(3,), logprobs=found[2:])


def test_choices_are_apart_and_one_that_nobody_has_seen_is_new() -> None:
    replay = Replay(seen("ab", (1, 2), index=1))
    assert replay.output == ((), (1, 2))
    chunk = TokenChunk(text="ab", token_ids=(1, 2), index=0)
    assert replay.rest(chunk) is chunk
    assert replay.rest(TokenChunk(text="ab", token_ids=(1, 2), index=1)) is None


def test_nothing_seen_lets_everything_through() -> None:
    replay = Replay(StreamView())
    assert (replay.output, replay.is_complete) == ((), True)
    chunk = TokenChunk(text="", token_ids=(1,))
    assert replay.rest(chunk) is chunk
