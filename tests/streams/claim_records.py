"""Token records of runs that claim a stream, and what somebody sees who only follows the events."""

from __future__ import annotations

import hashlib

from schemas.tokens import Claim, End, EndStatus, Epoch, FinishReason, Kind, TokenRecord
from streams.claims import StreamView
from streams.stream_events import Event, StreamReset, TextAppended, TextRetracted

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
