"""How long readers waited: after a worker died, and at worst within each stream. Pure.

A take-over is a counting claim behind the first one of a request. Its recovery counts from the moment at which the
group noticed that a member was gone to the next token that the reader got from the new owner.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from ops.bench.chaos.checker import Entry, Seen
from schemas.tokens import Epoch, Kind

TOLERANCE_MS = 150  # the group is asked every few tens of milliseconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """A worker that was killed. `noticed_ms` is when its group had dropped it. Unix milliseconds."""

    worker: str
    killed_ms: int
    noticed_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TakeOver:
    """What a reader saw of a take-over: the last token before, the next one after, and when a death was noticed.

    Unix milliseconds; `noticed_ms` is None where no death was behind it (a worker that joined or left, a lost lease).
    """

    before_ms: int
    noticed_ms: int | None
    arrival_ms: int

    @property
    def gap_ms(self) -> int:
        """Return how long the reader waited between two tokens."""
        return self.arrival_ms - self.before_ms

    @property
    def recovery_ms(self) -> int | None:
        """Return how long the reader waited from the group's notice on; None without a death."""
        return None if self.noticed_ms is None else max(0, self.arrival_ms - self.noticed_ms)

    def is_within(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Return whether the wait fell on one of some spans of time."""
        return any(begin <= self.arrival_ms and self.before_ms <= end for begin, end in spans)


def take_overs(entries: Sequence[Entry], seen: Seen, deaths: Sequence[Death]) -> list[TakeOver]:
    """Return the take-overs of one request behind which its reader got a token."""
    found = []
    for claim, first in _claims(entries):
        after = bisect.bisect_left(seen.arrivals, first.timestamp_ms)
        if after == len(seen.arrivals) or after == 0:
            continue  # nothing came, or nothing had come: a wait for the first token is no gap in a stream
        arrival, before = seen.arrivals[after], seen.arrivals[after - 1]
        noticed = _cause(claim.timestamp_ms, before, deaths)
        found.append(TakeOver(before_ms=before, noticed_ms=noticed, arrival_ms=arrival))
    return found


def longest_gap_ms(seen: Seen) -> int:
    """Return the longest time between two tokens of a stream, 0 where there are not two."""
    return max((b - a for a, b in zip(seen.arrivals, seen.arrivals[1:], strict=False)), default=0)


def _claims(entries: Sequence[Entry]) -> list[tuple[Entry, Entry]]:
    """Return each counting claim behind the first with the first text record of its run."""
    found: list[tuple[Entry, Entry]] = []
    epoch: Epoch | None = None
    claim: Entry | None = None
    for entry in entries:
        record = entry.record
        if record.kind is Kind.SEE:
            continue
        if record.claim is not None and (epoch is None or record.epoch > epoch):
            claim, epoch = (None if epoch is None else entry), record.epoch
        if claim is not None and record.kind is Kind.DELTA and record.owner == claim.record.owner:
            found.append((claim, entry))
            claim = None
        if record.kind is Kind.END and record.epoch == epoch:
            break
    return found


def _cause(claim_ms: int, last_token_ms: int, deaths: Sequence[Death]) -> int | None:
    """Return when the death behind a take-over was noticed: before the claim, and no token came after it."""
    noticed = [
        death.noticed_ms
        for death in deaths
        if death.killed_ms <= claim_ms and last_token_ms - TOLERANCE_MS <= death.noticed_ms <= claim_ms + TOLERANCE_MS
    ]
    return max(noticed, default=None)
