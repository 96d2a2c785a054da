"""What may happen next in a state: what the group, the workers and their runs do, and every fault that is left.

The steps of a run are those of the generation pool: claim → read → ended, owned or another's → continue → end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, product
from typing import NamedTuple, TypeVar

from schemas.tokens import Epoch, Kind
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
    committable,
    is_committed,
    open_run,
    read,
)
from workers.handler import REFUSAL_HOP


class Step(NamedTuple):
    """What happens, and what then is. `is_due`: a fair schedule does it; else it is a fault that may come or not."""

    name: str
    after: State
    is_due: bool = True


def steps(state: State, bounds: Bounds) -> list[Step]:
    """Return every step that may come next."""
    for at, worker in enumerate(state.workers):
        if (received := _received(state, worker)) is not None:
            return [Step(f"worker {at} receives", _with(state, at, received))]
    found = [*_asked(state), *_group(state)]
    for at in range(len(state.workers)):
        found.extend(_worker(state, bounds, at))
    found.extend(_faults(state, bounds))
    if not any(step.is_due for step in found):
        found.extend(_expired(state, is_due=True))  # the other run is silent for ever
    return found


def fault_of(state: State, bounds: Bounds) -> str:
    """Return which promise is broken in a state, empty if none is."""
    seen = _seen(state, bounds)
    if seen.fault:
        return seen.fault
    if is_committed(state) and not seen.is_ended:
        return "lost: every copy is committed and the request has not ended"
    return ""


def unfinished(state: State, bounds: Bounds) -> str:
    """Return what is missing in a state in which nothing is due any more, empty if all is done."""
    if not any(worker.is_alive for worker in state.workers):
        return ""
    if not _seen(state, bounds).is_ended:
        return "nothing is due, and the request has not ended"
    return "" if is_committed(state) else "nothing is due, and a copy is not committed"


# The client and the group.


def _asked(state: State) -> Iterator[Step]:
    is_first = not any(state.hops)
    if is_first or state.left.copies:
        left = state.left if is_first else state.left._replace(copies=state.left.copies - 1)
        for partition in range(len(state.hops)):
            after = state._replace(hops=_appended(state.hops, partition, 0), left=left)
            yield Step(f"ask on {partition}", after, is_first)


def _group(state: State) -> Iterator[Step]:
    """Rebalance: by need where a member is dead or nobody is left, and else as often as the bounds allow."""
    alive = [at for at, worker in enumerate(state.workers) if worker.is_alive]
    members = [at for at, worker in enumerate(state.workers) if worker.assigned is not None]
    is_needed = bool(alive) and (not members or any(at not in alive for at in members))
    if not is_needed and not state.left.rebalances:
        return
    left = state.left if is_needed else state.left._replace(rebalances=state.left.rebalances - 1)
    able = [at for at in alive if state.workers[at].pending is None]
    for chosen in chain.from_iterable(combinations(able, size) for size in range(1, len(able) + 1)):
        for owners in product(chosen, repeat=len(state.hops)):
            workers = list(state.workers)
            for at, worker in enumerate(workers):
                if at not in chosen:
                    workers[at] = worker._replace(assigned=None)
                    continue
                given = tuple(partition for partition, owner in enumerate(owners) if owner == at)
                workers[at] = worker._replace(assigned=given, pending=(state.generation + 1, given))
            after = state._replace(workers=_sorted(workers), generation=state.generation + 1, left=left)
            yield Step(f"rebalance to {owners} among {chosen}", after, is_needed)


# What a worker does. Each move tells what is shared and the worker after it.


class Move(NamedTuple):
    """A step of one worker."""

    name: str
    shared: State
    worker: Worker
    is_due: bool = True


def _worker(state: State, bounds: Bounds, at: int) -> Iterator[Step]:
    worker = state.workers[at]
    if worker.is_alive:
        for move in _moves(state, bounds, worker):
            yield Step(f"worker {at} {move.name}", _with(move.shared, at, move.worker), move.is_due)


def _moves(state: State, bounds: Bounds, worker: Worker) -> Iterator[Move]:
    if worker.pending is not None:
        yield Move(f"learns {worker.pending}", state, _learned(state, worker, bounds))
    for owned in worker.owned:
        yield from _committed(state, worker, owned)
    for run in worker.runs:
        yield from _run(state, bounds, worker, run)
    if state.left.crashes:
        left = state.left._replace(crashes=state.left.crashes - 1)
        yield Move("dies", state._replace(left=left), Worker(is_alive=False, assigned=worker.assigned), False)


def _learned(state: State, worker: Worker, bounds: Bounds) -> Worker:
    assert worker.pending is not None
    generation, given = worker.pending
    is_consecutive = generation == worker.generation + 1 or Rule.RETAINED in bounds.without
    kept = {owned.partition: owned for owned in worker.owned if is_consecutive}
    cancelled = [run for run in worker.runs if run.partition not in kept or run.partition not in given]
    owned = []
    for partition in given:
        late = tuple(sorted(run.offset for run in cancelled if run.partition == partition))
        begin = state.committed[partition]
        new = Owned(
            partition, len(state.hops[partition]), begin, begin, late if _is_off(Rule.CANCELLED, bounds) else ()
        )
        owned.append(kept.get(partition, new))
    runs = tuple(run for run in worker.runs if run not in cancelled)
    learned = worker._replace(pending=None, generation=generation, owned=tuple(owned), runs=runs)
    return _released(learned)


def _received(state: State, worker: Worker) -> Worker | None:
    """Return the worker with the next copy that is there for it, None if there is none."""
    if worker.pending is not None:
        return None
    for owned in worker.owned:
        offset = owned.position
        if offset < len(state.hops[owned.partition]):
            moved = _owning(worker, owned._replace(position=offset + 1))
            if offset in owned.finished:
                return moved
            run = open_run(worker.generation, owned, offset, state.hops[owned.partition][offset])
            return _running(moved, run, run._replace(phase=Phase.QUEUED) if _is_busy(worker) else run)
    return None


def _committed(state: State, worker: Worker, owned: Owned) -> Iterator[Move]:
    if worker.assigned is None or worker.generation != state.generation:
        return  # the group refuses it
    offset = committable(owned.first, owned.position, owned.finished)
    if offset is not None and offset != state.committed[owned.partition]:
        shared = state._replace(committed=_set(state.committed, owned.partition, offset))
        pruned = owned._replace(first=offset, finished=tuple(at for at in owned.finished if at >= offset))
        yield Move(f"commits {owned.partition}:{offset}", shared, _owning(worker, pruned))


# What a run does.


def _run(state: State, bounds: Bounds, worker: Worker, run: Run) -> Iterator[Move]:
    match run.phase:
        case Phase.CLAIM if _is_off(Rule.READ_AFTER_CLAIM, bounds):
            early = run._replace(phase=Phase.READ, text=_seen(state, bounds).tokens)
            yield Move("reads before its claim", state, _running(worker, run, early))
        case Phase.CLAIM | Phase.READ | Phase.WRITE:
            yield from _written(state, bounds, worker, run)
        case Phase.SEND:
            yield Move("gives a send up", state, _given_up(worker, run))
        case Phase.WAIT if _seen(state, bounds).is_ended:
            yield Move("sees the end", state, _finished(worker, run, bounds))
        case Phase.REPRODUCE:
            hop = state.hops[run.partition][run.offset] + 1
            for partition in range(len(state.hops)):
                shared = state._replace(hops=_appended(state.hops, partition, hop))
                yield Move(f"re-produces on {partition}", shared, _acknowledged(_running(worker, run), run))


def _written(state: State, bounds: Bounds, worker: Worker, run: Run) -> Iterator[Move]:
    """Write the next record; with a fault it comes once more later, or its run never hears of it."""
    if run.owner < 0:
        named = run._replace(owner=state.next_owner)
        state, worker, run = state._replace(next_owner=named.owner + 1), _running(worker, run, named), named
    yield from _sent(state, bounds, worker, run, _record(run, bounds))
    if state.left.failures and run.phase is Phase.WRITE and len(run.text) < bounds.num_tokens:
        left = state.left._replace(failures=state.left.failures - 1)
        end = Written(Kind.END, run.epoch, run.owner, run.text, not run.is_claimed)
        yield Move("fails", _logged(state._replace(left=left), end, bounds), _finished(worker, run, bounds), False)


def _sent(state: State, bounds: Bounds, worker: Worker, run: Run, record: Written) -> Iterator[Move]:
    there = _logged(state, record, bounds)
    if there.log is state.log and record.kind is not Kind.CLAIM and not _is_off(Rule.EPOCH, bounds):
        yield Move("writes to its end in vain", state, _finished(worker, run, bounds))
        return
    yield Move(f"writes {record.kind}", there, _wrote(there, bounds, worker, run, record))
    if state.left.losses:
        left = state.left._replace(losses=state.left.losses - 1)
        late = tuple(sorted((*state.late, record)))
        there = there._replace(late=late, left=left)
        yield Move(f"writes {record.kind} twice", there, _wrote(there, bounds, worker, run, record), False)
        sent = _running(worker, run, run._replace(phase=Phase.SEND))
        yield Move(f"sends {record.kind} and hears nothing", state._replace(late=late, left=left), sent, False)


def _logged(state: State, record: Written, bounds: Bounds) -> State:
    """Return the state with a record in the log, unless it changes nothing for anybody: then without it."""
    log = (*state.log, record)
    seen = read(log, not _is_off(Rule.EPOCH, bounds))
    if seen.num_ignored and not seen.fault:
        return state
    late = state.late if _is_off(Rule.EPOCH, bounds) else tuple(each for each in state.late if _may_count(each, seen))
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
        return _finished(worker, run, bounds)
    if record.kind is not Kind.CLAIM:
        return _running(worker, run, run._replace(text=record.text, is_claimed=True, is_reset_due=False))
    seen = _seen(state, bounds)
    if seen.is_ended:
        return _finished(worker, run, bounds)
    if (seen.epoch, seen.owner) != (run.epoch, run.owner):
        return _running(worker, run, run._replace(phase=Phase.WAIT, is_claimed=True))
    text = run.text if run.phase is Phase.READ else seen.tokens
    is_void = bounds.draws is Draws.RESTART and bool(text)
    text = () if is_void else text
    return _running(worker, run, run._replace(phase=Phase.WRITE, text=text, is_claimed=True, is_reset_due=is_void))


def _given_up(worker: Worker, run: Run) -> Worker:
    """The run hands the request on; copies that waited for it go on before that."""
    return _released(_running(worker, run, run._replace(phase=Phase.REPRODUCE)))


def _finished(worker: Worker, run: Run, bounds: Bounds) -> Worker:
    """Acknowledge a run; the first of the copies that waited for it then looks by itself whether there is an end."""
    worker = _acknowledged(_running(worker, run), run)
    for other in worker.runs:
        if other.phase is Phase.QUEUED and _is_off(Rule.SHARED, bounds):
            worker = _acknowledged(_running(worker, other), other)
    return _released(worker)


def _released(worker: Worker) -> Worker:
    """Start the first of the copies that waited for a run which is gone; another one may have begun it meanwhile."""
    if _is_busy(worker):
        return worker
    for run in worker.runs:
        if run.phase is Phase.QUEUED:
            return _running(worker, run, run._replace(phase=Phase.CLAIM))
    return worker


def _is_busy(worker: Worker) -> bool:
    return any(run.phase not in (Phase.QUEUED, Phase.REPRODUCE) for run in worker.runs)


# Faults from outside.


def _faults(state: State, bounds: Bounds) -> Iterator[Step]:
    for record in sorted(set(state.late)):
        late = list(state.late)
        late.remove(record)
        after = _logged(state._replace(late=tuple(late)), record, bounds)
        yield Step(f"late: {record.kind} of {record.epoch}", after, is_due=False)
    if state.left.expiries:
        yield from _expired(state, is_due=False)
    if state.left.failures and any(state.hops):
        left = state.left._replace(failures=state.left.failures - 1)
        refusal = Written(Kind.END, Epoch(REFUSAL_HOP, state.generation), state.next_owner, (), True)
        after = _logged(state._replace(left=left, next_owner=state.next_owner + 1), refusal, bounds)
        yield Step("a copy is refused before generation", after, is_due=False)


def _expired(state: State, *, is_due: bool) -> Iterator[Step]:
    """The lease of the other run is over for one that waits."""
    left = state.left if is_due else state.left._replace(expiries=state.left.expiries - 1)
    for at, worker in enumerate(state.workers):
        for run in worker.runs:
            if run.phase is Phase.WAIT:
                after = _with(state._replace(left=left), at, _given_up(worker, run))
                yield Step(f"worker {at} waits no longer", after, is_due)


# Values.


def _with(state: State, at: int, worker: Worker) -> State:
    return state._replace(workers=_sorted(_set(state.workers, at, worker)))


def _seen(state: State, bounds: Bounds) -> Seen:
    return read(state.log, not _is_off(Rule.EPOCH, bounds))


def _is_off(rule: Rule, bounds: Bounds) -> bool:
    return rule in bounds.without


def _running(worker: Worker, old: Run, *new: Run) -> Worker:
    return worker._replace(runs=tuple(sorted((*(run for run in worker.runs if run != old), *new))))


def _acknowledged(worker: Worker, run: Run) -> Worker:
    owned = next(owned for owned in worker.owned if owned.partition == run.partition)
    return _owning(worker, owned._replace(finished=tuple(sorted((*owned.finished, run.offset)))))


def _owning(worker: Worker, new: Owned) -> Worker:
    return worker._replace(owned=tuple(new if owned.partition == new.partition else owned for owned in worker.owned))


def _appended(hops: tuple[tuple[int, ...], ...], partition: int, hop: int) -> tuple[tuple[int, ...], ...]:
    return _set(hops, partition, (*hops[partition], hop))


T = TypeVar("T")


def _set(values: tuple[T, ...], at: int, value: T) -> tuple[T, ...]:
    return (*values[:at], value, *values[at + 1 :])


def _sorted(workers: Sequence[Worker]) -> tuple[Worker, ...]:
    """Workers are alike: only what each of them is counts, not which one it is."""
    return tuple(sorted(workers, key=hash))
