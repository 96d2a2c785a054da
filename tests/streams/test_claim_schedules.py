"""Random schedules of owners that die, pause and wake: the text is whole for every reader, and ends once."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from schemas.tokens import Epoch, TokenRecord
from streams.claims import StreamView
from streams.stream_events import StreamEnded
from tests.streams.claim_records import claim, delta, end, feed, shown

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
