"""Made-up logs: runs written record by record, as workers write them, and what a reader made of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ops.bench.chaos.checker import Entry, Expected, Seen
from schemas.tokens import Choice, Claim, End, EndStatus, Epoch, FinishReason, Kind, TokenRecord, Usage

TEXT = "hello there"
PROMPT_TOKENS = 7
EXPECTED = Expected(
    texts=(TEXT,), token_ids=(tuple(TEXT.encode()),), reasons=(FinishReason.STOP,), prompt_tokens=PROMPT_TOKENS
)


def log(*records: TokenRecord) -> list[Entry]:
    """Return records as they stand in partition 0, ten milliseconds apart."""
    return [
        Entry(partition=0, offset=n, timestamp_ms=1_000 + 10 * n, record=record) for n, record in enumerate(records)
    ]


def claim(generation: int, owner: str | None = None, *, hop: int = 0) -> TokenRecord:
    return TokenRecord(kind=Kind.CLAIM, epoch=Epoch(hop, generation), owner=owner or f"o{generation}", claim=Claim())


def delta(generation: int, seq: int, text: str, *, is_first: bool = False, owner: str | None = None) -> TokenRecord:
    return TokenRecord(
        kind=Kind.DELTA,
        epoch=Epoch(0, generation),
        owner=owner or f"o{generation}",
        seq=seq,
        text=text,
        token_ids=tuple(text.encode()),
        claim=Claim() if is_first else None,
    )


def reset(generation: int, seq: int) -> TokenRecord:
    return TokenRecord(kind=Kind.RESET, epoch=Epoch(0, generation), owner=f"o{generation}", seq=seq)


def end(
    generation: int,
    num_records: int,
    *,
    text: str = TEXT,
    num_tokens: int = len(TEXT),
    prompt_tokens: int = PROMPT_TOKENS,
    reason: FinishReason = FinishReason.STOP,
    status: EndStatus = EndStatus.COMPLETED,
    choices: tuple[Choice, ...] = (),
    hop: int = 0,
) -> TokenRecord:
    return TokenRecord(
        kind=Kind.END,
        epoch=Epoch(hop, generation),
        owner=f"o{generation}",
        seq=num_tokens,
        end=End(
            status=status,
            finish_reason=reason,
            usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=num_tokens),
            num_records=num_records,
            sha256=hashlib.sha256(text.encode()).hexdigest(),
            choices=choices,
        ),
    )


def undisturbed() -> list[Entry]:
    return log(delta(1, 0, "hello", is_first=True), delta(1, 5, " there"), end(1, 3))


def taken_over() -> list[Entry]:
    """The first owner dies behind `hello`, the second continues."""
    return log(delta(1, 0, "hello", is_first=True), claim(2), delta(2, 5, " there"), end(2, 3))


def seen(entries: Sequence[Entry], *, text: str = TEXT, num_ends: int = 1, num_resets: int = 0) -> Seen:
    """Return what a reader saw that got `text` and the end of a log."""
    (last,) = [entry.record.end for entry in entries if entry.record.end is not None][-1:]
    return Seen(
        request_id="r",
        texts={0: text},
        token_ids={0: list(text.encode())},
        ends=[last] * num_ends,
        num_resets=num_resets,
    )
