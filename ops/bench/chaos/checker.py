"""Judges a request by its records in the log, by what its reader saw, and by what an undisturbed run says. Pure.

Every assertion of the delivery guarantee is one function here: exactly one effective end, dense seq, nothing of a
stale epoch delivered, the text and tokens of an undisturbed run, right usage, and an end behind every committed offset.
Which records count is decided by `streams.claims`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from schemas.codec import pack
from schemas.errors import StreamGapError
from schemas.tokens import End, EndStatus, Epoch, FinishReason, Kind, TokenRecord
from streams.broker import TopicPartition
from streams.claims import StreamView

Memory = tuple[tuple[str, str], ...]


class Fault(StrEnum):
    """How a request was harmed."""

    LOST = "lost"
    """It has no effective end, or its reader never saw it."""
    DUPLICATED = "duplicated"
    """Its reader got tokens or an end twice."""
    ALTERED = "altered"
    """It ended with another answer than an undisturbed run, or its reader saw another one on the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One broken promise. `what` is for people."""

    request_id: str
    fault: Fault
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One record of a request as it stands in the log."""

    partition: int
    offset: int
    timestamp_ms: int
    record: TokenRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """What an undisturbed run says: text, tokens and finish reason of each choice, and the length of its prompt."""

    texts: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    reasons: tuple[FinishReason, ...]
    prompt_tokens: int

    @property
    def completion_tokens(self) -> int:
        """Return the tokens of all choices."""
        return sum(map(len, self.token_ids))


@dataclass(slots=True, kw_only=True)
class Seen:
    """What a live reader was handed. Times are Unix milliseconds; `arrivals` has one for every chunk with tokens."""

    request_id: str
    texts: dict[int, str] = field(default_factory=dict)
    token_ids: dict[int, list[int]] = field(default_factory=dict)
    ends: list[End] = field(default_factory=list)
    num_resets: int = 0
    failure: str = ""
    sent_ms: int = 0
    arrivals: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """A record of a pool's topic: its request, and whether that was handed on later (a higher hop, a retry)."""

    place: TopicPartition
    offset: int
    request_id: str
    is_handed_on: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """A look at a group while everything runs: what it had committed, and then how long the token log was."""

    group: str
    committed: Mapping[TopicPartition, int]
    token_ends: Mapping[int, int]


def check_request(
    request_id: str, entries: Sequence[Entry], expected: Expected, seen: Seen | None = None
) -> list[Problem]:
    """Return what is wrong with one request. `entries` are all of its records, in the order of the log."""
    view, gap = read(entries)
    found = [_problem(request_id, Fault.ALTERED, gap)] if gap else []
    if view.end is None:
        return [*found, _problem(request_id, Fault.LOST, "the log has no effective end")]
    found += _check_end(request_id, view, view.end, entries, expected)
    found += _check_text(request_id, view, expected)
    if seen is not None:
        found += _check_seen(request_id, view, seen)
    return found


def read(entries: Sequence[Entry]) -> tuple[StreamView, str]:
    """Return the view of a stream and, where a record is missing, at which one reading stopped."""
    view = StreamView()
    for entry in entries:
        try:
            view.apply(entry.record, entry.offset)
        except StreamGapError as error:
            return view, f"offset {entry.offset}: {error.message}"
    return view, ""


def is_answered_again(entries: Sequence[Entry]) -> bool:
    """Return whether a run of a higher epoch ended the request again, behind its effective end.

    No reader sees it. It happens where a router has forwarded a record twice, and costs the work of an answer.
    """
    highest: Epoch | None = None
    ended: Epoch | None = None
    for entry in entries:
        record = entry.record
        if record.kind is Kind.SEE:
            continue
        if record.claim is not None and (highest is None or record.epoch > highest):
            highest = record.epoch
        if record.kind is Kind.END and record.epoch == highest:
            if ended is not None and record.epoch > ended:
                return True
            ended = ended or record.epoch
    return False


def end_place(entries: Sequence[Entry]) -> tuple[int, int] | None:
    """Return partition and offset of the effective end, None if there is none."""
    view = StreamView()
    for entry in entries:
        try:
            view.apply(entry.record, entry.offset)
        except StreamGapError:
            return None
        if view.is_ended:
            return entry.partition, entry.offset
    return None


def check_commits(received: Sequence[Received], audit: Audit, ends: Mapping[str, tuple[int, int]]) -> list[Problem]:
    """Return the requests of which every record was committed before they were answered or handed on.

    A router that dies may forward a request twice. The copy whose run is outranked ends in vain and is committed; the
    other one stands for the request then. `ends` is the place of each request's effective end: partition and offset in
    the token topic.
    """
    found = []
    held = {record.request_id for record in received if record.offset >= audit.committed.get(record.place, 0)}
    for record in received:
        if record.request_id in held or record.is_handed_on:
            continue
        partition, offset = ends.get(record.request_id, (-1, 0))
        if offset >= audit.token_ends.get(partition, 0):
            where = f"{record.place.topic}-{record.place.partition}, offset {record.offset}"
            found.append(_problem(record.request_id, Fault.LOST, f"{audit.group} committed {where} before its end"))
    return found


def check_memory(request_id: str, memory: Memory, earlier: Memory) -> list[Problem]:
    """Return a problem unless what a run remembered are turns of its session, as they were, in their order."""
    left = list(earlier)
    for turn in memory:
        if turn not in left:
            return [_problem(request_id, Fault.ALTERED, f"remembers a turn that was not, or out of order: {turn[0]!r}")]
        del left[: left.index(turn) + 1]
    return []


def _check_end(
    request_id: str, view: StreamView, end: End, entries: Sequence[Entry], expected: Expected
) -> list[Problem]:
    wrong = []
    if end.status not in (EndStatus.COMPLETED, EndStatus.INCOMPLETE):
        code = end.failure.code if end.failure else end.status
        return [_problem(request_id, Fault.ALTERED, f"ended as {end.status}: {code}")]
    num_visible = sum(len(view.token_ids(index)) for index in view.indexes)
    if end.usage.completion_tokens != num_visible:
        wrong.append(f"usage says {end.usage.completion_tokens} tokens, {num_visible} are visible")
    if end.usage.prompt_tokens != expected.prompt_tokens:
        wrong.append(f"usage says {end.usage.prompt_tokens} prompt tokens, expected {expected.prompt_tokens}")
    if end.sha256 != hashlib.sha256(view.text().encode()).hexdigest():
        wrong.append("the hash of the end is not that of the text")
    reasons = tuple(choice.finish_reason for choice in end.choices) or (end.finish_reason,)
    if reasons != expected.reasons:
        wrong.append(f"finished by {', '.join(reasons)}, expected {', '.join(expected.reasons)}")
    # A record whose acknowledgement was lost may have been written twice: it counts once.
    num_records = len({pack(entry.record) for entry in entries if entry.record.owner == view.owner})
    if end.num_records != num_records:
        wrong.append(f"the end speaks of {end.num_records} records of its run, the log has {num_records}")
    return [_problem(request_id, Fault.ALTERED, what) for what in wrong]


def _check_text(request_id: str, view: StreamView, expected: Expected) -> list[Problem]:
    if view.end is not None and view.end.status is EndStatus.FAILED:
        return []  # said already
    wrong = []
    for index, (text, token_ids) in enumerate(zip(expected.texts, expected.token_ids, strict=True)):
        if view.text(index) != text:
            wrong.append(f"choice {index}: {_difference(view.text(index), text)}")
        if view.token_ids(index) != token_ids:
            wrong.append(f"choice {index}: {_difference(view.token_ids(index), token_ids)}")
    return [_problem(request_id, Fault.ALTERED, what) for what in wrong]


def _check_seen(request_id: str, view: StreamView, seen: Seen) -> list[Problem]:
    """Compare what the reader was handed with what the log says."""
    if not seen.ends:
        return [_problem(request_id, Fault.LOST, f"its reader saw no end: {seen.failure or 'no error'}")]
    found = []
    if len(seen.ends) > 1:
        found.append(_problem(request_id, Fault.DUPLICATED, f"its reader saw {len(seen.ends)} ends"))
    if seen.ends[-1] != view.end:
        found.append(_problem(request_id, Fault.ALTERED, "its reader saw another end than the log has"))
    if seen.num_resets:
        found.append(_problem(request_id, Fault.ALTERED, f"its reader saw {seen.num_resets} resets"))
    for index in sorted({*view.indexes, *seen.texts}):
        tokens, wanted = tuple(seen.token_ids.get(index, ())), view.token_ids(index)
        if len(tokens) > len(wanted):
            more = f"choice {index}: its reader got {len(tokens)} tokens, the log has {len(wanted)}"
            found.append(_problem(request_id, Fault.DUPLICATED, more))
        elif tokens != wanted or seen.texts.get(index, "") != view.text(index):
            found.append(_problem(request_id, Fault.ALTERED, f"choice {index}: its reader saw another text"))
    return found


def _difference(found: str | tuple[int, ...], expected: str | tuple[int, ...]) -> str:
    at = next(
        (n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), min(len(found), len(expected))
    )
    shown = f"{found[at : at + 8]!r} instead of {expected[at : at + 8]!r}"
    return f"differs at {at} of {len(expected)} (length {len(found)}): {shown}"


def _problem(request_id: str, fault: Fault, what: str) -> Problem:
    return Problem(request_id=request_id, fault=fault, what=what)
