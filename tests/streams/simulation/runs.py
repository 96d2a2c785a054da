"""What a run of the request does next: claim → read → ended, owned or another's → continue → end, and how it fails.

The steps are those of the generation pool; each tells what is shared and the worker after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeVar

from schemas.tokens import Kind
from tests.streams.simulation.model import (
    Bounds,
    Draws,
    Owned,
    Phase,
    Rule,
    Run,
    Seen,
    State,
    Worker,
    Written,
    read,
)

T = TypeVar("T")


class Move(NamedTuple):
    """A step of one worker."""

    name: str
    shared: State
    worker: Worker
    is_due: bool = True


def run_moves(state: State, bounds: Bounds, worker: Worker, run: Run) -> Iterator[Move]:
    match run.phase:
        case Phase.CLAIM if is_off(Rule.READ_AFTER_CLAIM, bounds):
            early = run._replace(phase=Phase.READ, text=seen_by(state, bounds).tokens)
            yield Move("reads before its claim", state, running(worker, run, early))
        case Phase.CLAIM | Phase.READ | Phase.WRITE:
            yield from _written(state, bounds, worker, run)
        case Phase.SEND:
            yield Move("gives a send up", state, given_up(worker, run))
        case Phase.WAIT if seen_by(state, bounds).is_ended:
            yield Move("sees the end", state, finished(worker, run, bounds))
        case Phase.REPRODUCE:
            hop = state.hops[run.partition][run.offset] + 1
            for partition in range(len(state.hops)):
                shared = state._replace(hops=appended(state.hops, partition, hop))
                yield Move(f"re-produces on {partition}", shared, acknowledged(running(worker, run), run))


def _written(state: State, bounds: Bounds, worker: Worker, run: Run) -> Iterator[Move]:
    """Write the next record; with a fault it comes once more later, or its run never hears of it."""
    if run.owner < 0:
        named = run._replace(owner=state.next_owner)
        state, worker, run = state._replace(next_owner=named.owner + 1), running(worker, run, named), named
    yield from _sent(state, bounds, worker, run, _record(run, bounds))
    if state.left.failures and run.phase is Phase.WRITE and len(run.text) < bounds.num_tokens:
        left = state.left._replace(failures=state.left.failures - 1)
        end = Written(Kind.END, run.epoch, run.owner, run.text, not run.is_claimed)
        yield Move("fails", logged(state._replace(left=left), end, bounds), finished(worker, run, bounds), False)


def _sent(state: State, bounds: Bounds, worker: Worker, run: Run, record: Written) -> Iterator[Move]:
    there = logged(state, record, bounds)
    if there.log is state.log and record.kind is not Kind.CLAIM and not is_off(Rule.EPOCH, bounds):
        yield Move("writes to its end in vain", state, finished(worker, run, bounds))
        return
    yield Move(f"writes {record.kind}", there, _wrote(there, bounds, worker, run, record))
    if state.left.losses:
        left = state.left._replace(losses=state.left.losses - 1)
        late = tuple(sorted((*state.late, record)))
        there = there._replace(late=late, left=left)
        yield Move(f"writes {record.kind} twice", there, _wrote(there, bounds, worker, run, record), False)
        sent = running(worker, run, run._replace(phase=Phase.SEND))
        yield Move(f"sends {record.kind} and hears nothing", state._replace(late=late, left=left), sent, False)


def logged(state: State, record: Written, bounds: Bounds) -> State:
    """Return the state with a record in the log, unless it changes nothing for anybody: then without it."""
    log = (*state.log, record)
    seen = read(log, not is_off(Rule.EPOCH, bounds))
    if seen.num_ignored and not seen.fault:
        return state
    late = state.late if is_off(Rule.EPOCH, bounds) else tuple(each for each in state.late if _may_count(each, seen))
    return state._replace(log=log, late=late)


def _may_count(late: Written, seen: Seen) -> bool:
    """Return whether a record may yet change something: no other than those of an epoch that is over."""
    if seen.is_ended or seen.epoch is None:
        return not seen.is_ended
    return late.epoch > seen.epoch or (late.epoch == seen.epoch and late.owner == seen.owner)


def _record(run: Run, bounds: Bounds) -> Written:
    if run.phase is not Phase.WRITE:
        return Written(Kind.CLAIM, run.epoch, run.owner, (), True)
    is_claim = not run.is_claimed
    if run.is_reset_due:
        return Written(Kind.RESET, run.epoch, run.owner, (), is_claim)
    if len(run.text) == bounds.num_tokens:
        return Written(Kind.END, run.epoch, run.owner, run.text, is_claim)
    return Written(Kind.DELTA, run.epoch, run.owner, (*run.text, _token(run, bounds.draws)), is_claim)


def _token(run: Run, draws: Draws) -> int:
    seq = len(run.text)
    return ord("a") + seq if draws is Draws.SAME else 0x4E00 + 16 * run.owner + seq


def _wrote(state: State, bounds: Bounds, worker: Worker, run: Run, record: Written) -> Worker:
    """Return the worker after a run's record stands in the log."""
    if record.kind is Kind.END:
        return finished(worker, run, bounds)
    if record.kind is not Kind.CLAIM:
        return running(worker, run, run._replace(text=record.text, is_claimed=True, is_reset_due=False))
    seen = seen_by(state, bounds)
    if seen.is_ended:
        return finished(worker, run, bounds)
    if (seen.epoch, seen.owner) != (run.epoch, run.owner):
        return running(worker, run, run._replace(phase=Phase.WAIT, is_claimed=True))
    text = run.text if run.phase is Phase.READ else seen.tokens
    is_void = bounds.draws is Draws.RESTART and bool(text)
    text = () if is_void else text
    return running(worker, run, run._replace(phase=Phase.WRITE, text=text, is_claimed=True, is_reset_due=is_void))


def given_up(worker: Worker, run: Run) -> Worker:
    """The run hands the request on; copies that waited for it go on before that."""
    return released(running(worker, run, run._replace(phase=Phase.REPRODUCE)))


def finished(worker: Worker, run: Run, bounds: Bounds) -> Worker:
    """Acknowledge a run; the first of the copies that waited for it then looks by itself whether there is an end."""
    worker = acknowledged(running(worker, run), run)
    for other in worker.runs:
        if other.phase is Phase.QUEUED and is_off(Rule.SHARED, bounds):
            worker = acknowledged(running(worker, other), other)
    return released(worker)


def released(worker: Worker) -> Worker:
    """Start the first of the copies that waited for a run which is gone; another one may have begun it meanwhile."""
    if is_busy(worker):
        return worker
    for run in worker.runs:
        if run.phase is Phase.QUEUED:
            return running(worker, run, run._replace(phase=Phase.CLAIM))
    return worker


def is_busy(worker: Worker) -> bool:
    return any(run.phase not in (Phase.QUEUED, Phase.REPRODUCE) for run in worker.runs)


# Values.


def seen_by(state: State, bounds: Bounds) -> Seen:
    return read(state.log, not is_off(Rule.EPOCH, bounds))


def is_off(rule: Rule, bounds: Bounds) -> bool:
    return rule in bounds.without


def running(worker: Worker, old: Run, *new: Run) -> Worker:
    return worker._replace(runs=tuple(sorted((*(run for run in worker.runs if run != old), *new))))


def acknowledged(worker: Worker, run: Run) -> Worker:
    owned = next(owned for owned in worker.owned if owned.partition == run.partition)
    return owning(worker, owned._replace(finished=tuple(sorted((*owned.finished, run.offset)))))


def owning(worker: Worker, new: Owned) -> Worker:
    return worker._replace(owned=tuple(new if owned.partition == new.partition else owned for owned in worker.owned))


def appended(hops: tuple[tuple[int, ...], ...], partition: int, hop: int) -> tuple[tuple[int, ...], ...]:
    return replaced(hops, partition, (*hops[partition], hop))


def replaced(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])
