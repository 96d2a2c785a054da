"""The state of the model, its bounds, and where the code under test decides: what counts, what may be committed.

One request: its copies stand in the partitions of a pool's topic, its records in one log. Workers know what they have
learned of the group, which may be old, and act on it without asking whether their lease still holds: no promise may
rest on that. All values are immutable, so that states can be compared and hashed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from schemas.errors import StreamGapError
from schemas.tokens import Claim, End, EndStatus, Epoch, FinishReason, Kind, TokenRecord
from streams.claims import StreamView
from streams.offsets import OffsetTracker
from streams.stream_events import StreamEnded, StreamReset, TextAppended
from workers.handler import REFUSAL_HOP

Text = tuple[int, ...]


class Draws(StrEnum):
    """How a run comes by its tokens."""

    SAME = "same"
    """Every run draws the same tokens: exact continuation."""
    OTHER = "other"
    """Each run draws tokens of its own and continues what it finds."""
    RESTART = "restart"
    """Each run draws tokens of its own and voids what it finds: another model."""


class Rule(StrEnum):
    """What the protocol rests on. Leaving one out must show."""

    EPOCH = "epoch"
    """A claim counts only if its epoch is greater than that of every earlier one."""
    RETAINED = "retained"
    """A partition is kept only over consecutive generations."""
    CANCELLED = "cancelled"
    """The acknowledgement of a cancelled run commits nothing."""
    READ_AFTER_CLAIM = "read after claim"
    """A take-over reads the stream after its claim stands in the log."""
    SHARED = "shared"
    """A copy that waited for another one here is acknowledged only once the log shows the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """How large the model is and how often each fault may come."""

    num_workers: int = 2
    num_partitions: int = 1
    num_tokens: int = 2
    draws: Draws = Draws.SAME
    copies: int = 0
    """Further copies of the request: repeated by the client while Redis is down, or forwarded twice."""
    crashes: int = 1
    rebalances: int = 2
    """Beyond those that follow a crash; who is left out of one has been paused too long, and does not know it."""
    losses: int = 1
    """Acknowledgements that get lost: the record is written later, once more, or never."""
    expiries: int = 0
    """Leases that run out although the other run is only slow."""
    failures: int = 0
    """Runs that end early, and ends that come from before generation."""
    without: frozenset[Rule] = frozenset()


class Written(NamedTuple):
    """A record of the token stream. `text` is what its run takes for the whole text after it."""

    kind: Kind
    epoch: Epoch
    owner: int
    text: Text
    is_claim: bool


class Phase(StrEnum):
    """Where a run stands."""

    CLAIM = "claim"
    """It may be a take-over: its claim comes first."""
    READ = "read"
    """It has read before its claim, which is wrong."""
    WRITE = "write"
    """It writes its next token, or the end."""
    SEND = "send"
    """A record is on its way and nobody knows whether it will arrive."""
    WAIT = "wait"
    """Its claim does not count: it waits for the end."""
    REPRODUCE = "reproduce"
    """It has failed, or waited for too long: it hands the request on with a higher hop."""
    QUEUED = "queued"
    """The same request runs here already."""


class Run(NamedTuple):
    """One copy of the request in work. `owner` is -1 before its first record."""

    partition: int
    offset: int
    epoch: Epoch
    phase: Phase
    owner: int = -1
    text: Text = ()
    is_claimed: bool = False
    is_reset_due: bool = False


class Owned(NamedTuple):
    """A partition as its worker believes to own it."""

    partition: int
    end_offset: int
    first: int
    position: int
    finished: tuple[int, ...] = ()


class Worker(NamedTuple):
    """`assigned` and `pending` are the group's side, the rest is what the worker knows."""

    is_alive: bool = True
    assigned: tuple[int, ...] | None = None
    pending: tuple[int, tuple[int, ...]] | None = None
    generation: int = -1
    owned: tuple[Owned, ...] = ()
    runs: tuple[Run, ...] = ()


class Left(NamedTuple):
    """How many of each fault may still come."""

    copies: int
    crashes: int
    rebalances: int
    losses: int
    expiries: int
    failures: int


class State(NamedTuple):
    """Everything. `hops` holds the hop of each copy, by partition; `late` the records that may still arrive."""

    log: tuple[Written, ...]
    hops: tuple[tuple[int, ...], ...]
    committed: tuple[int, ...]
    generation: int
    workers: tuple[Worker, ...]
    late: tuple[Written, ...]
    next_owner: int
    left: Left


class Seen(NamedTuple):
    """What the log says. `fault` names what a reader must never meet."""

    tokens: Text = ()
    epoch: Epoch | None = None
    owner: int | None = None
    is_ended: bool = False
    num_ignored: int = 0
    fault: str = ""


class _AnyEpoch(Epoch):
    """An epoch that outranks every other one: the comparison is switched off."""

    __slots__ = ()

    def __gt__(self, other: object) -> bool:
        return True


def start(bounds: Bounds) -> State:
    """Return the state in which nobody has joined and nothing was asked."""
    return State(
        log=(),
        hops=((),) * bounds.num_partitions,
        committed=(0,) * bounds.num_partitions,
        generation=0,
        workers=(Worker(),) * bounds.num_workers,
        late=(),
        next_owner=0,
        left=Left(bounds.copies, bounds.crashes, bounds.rebalances, bounds.losses, bounds.expiries, bounds.failures),
    )


def is_committed(state: State) -> bool:
    """Return whether the request was asked and every copy of it is behind the committed offsets."""
    return any(state.hops) and all(c >= len(h) for c, h in zip(state.committed, state.hops, strict=True))


# Where the code under test decides.


@cache
def record_of(written: Written, is_epoch_compared: bool = True) -> TokenRecord:
    """Return a record as it stands on the wire."""
    epoch = written.epoch if is_epoch_compared else _AnyEpoch(*written.epoch)
    text = "".join(map(chr, written.text))
    is_delta, is_end = written.kind is Kind.DELTA, written.kind is Kind.END
    end = End(
        status=EndStatus.COMPLETED,
        finish_reason=FinishReason.STOP,
        sha256="" if written.epoch.hop == REFUSAL_HOP else hashlib.sha256(text.encode()).hexdigest(),
    )
    return TokenRecord(
        kind=written.kind,
        epoch=epoch,
        owner=str(written.owner),
        seq=len(written.text) - is_delta,
        text=text[-1] if is_delta else "",
        token_ids=written.text[-1:] if is_delta else (),
        claim=Claim() if written.is_claim else None,
        end=end if is_end else None,
    )


@cache
def read(log: tuple[Written, ...], is_epoch_compared: bool = True) -> Seen:
    """Read a log as a client does and check what it meets; the same view is what a worker goes by."""
    view = StreamView()
    tokens: list[int] = []
    num_ends = 0
    for offset, written in enumerate(log):
        try:
            events = view.apply(record_of(written, is_epoch_compared), offset)
        except StreamGapError as error:
            return Seen(fault=f"gap: {error.message}")
        if events and num_ends:
            return Seen(fault="something came after the end")
        for event in events:
            match event:
                case TextAppended():
                    tokens.extend(event.token_ids)
                case StreamReset():
                    tokens.clear()
                case StreamEnded():
                    num_ends += 1
        if tuple(tokens) != view.token_ids() or view.text() != "".join(map(chr, tokens)):
            return Seen(fault="what a reader was given is not what the view shows")
        if tokens and tuple(tokens) not in {earlier.text for earlier in log[: offset + 1]}:
            return Seen(fault="the visible text is that of no run")
    owner = None if view.owner is None else int(view.owner)
    epoch = None if view.epoch is None else Epoch(*view.epoch)
    return Seen(tuple(tokens), epoch, owner, view.is_ended, view.num_ignored)


@cache
def committable(first: int, position: int, finished: tuple[int, ...]) -> int | None:
    """Return what may be committed of a partition received from `first` to `position`."""
    tracker = OffsetTracker()
    for offset in range(first, position):
        tracker.start(offset)
    for offset in finished:
        tracker.start(offset)
        tracker.finish(offset)
    return tracker.committable()


def open_run(generation: int, owned: Owned, offset: int, hop: int) -> Run:
    """Return the run of a copy that a worker was given; one that was there before the worker may be a take-over."""
    phase = Phase.CLAIM if offset < owned.end_offset or hop > 0 else Phase.WRITE
    return Run(owned.partition, offset, Epoch(hop, generation), phase)
