"""What may happen next in a state: what the group, the workers and their runs do, and every fault that is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, combinations, product
from typing import NamedTuple

from schemas.tokens import Epoch, Kind
from tests.streams.simulation.model import (
    Bounds,
    Owned,
    Phase,
    Rule,
    State,
    Worker,
    Written,
    committable,
    is_committed,
    open_run,
)
from tests.streams.simulation.runs import (
    Move,
    appended,
    given_up,
    is_busy,
    is_off,
    logged,
    owning,
    released,
    replaced,
    run_moves,
    running,
    seen_by,
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
    seen = seen_by(state, bounds)
    if seen.fault:
        return seen.fault
    if is_committed(state) and not seen.is_ended:
        return "lost: every copy is committed and the request has not ended"
    return ""


def unfinished(state: State, bounds: Bounds) -> str:
    """Return what is missing in a state in which nothing is due any more, empty if all is done."""
    if not any(worker.is_alive for worker in state.workers):
        return ""
    if not seen_by(state, bounds).is_ended:
        return "nothing is due, and the request has not ended"
    return "" if is_committed(state) else "nothing is due, and a copy is not committed"


# The client and the group.


def _asked(state: State) -> Iterator[Step]:
    is_first = not any(state.hops)
    if is_first or state.left.copies:
        left = state.left if is_first else state.left._replace(copies=state.left.copies - 1)
        for partition in range(len(state.hops)):
            after = state._replace(hops=appended(state.hops, partition, 0), left=left)
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


# What a worker does.


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
        yield from run_moves(state, bounds, worker, run)
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
        new = Owned(partition, len(state.hops[partition]), begin, begin, late if is_off(Rule.CANCELLED, bounds) else ())
        owned.append(kept.get(partition, new))
    runs = tuple(run for run in worker.runs if run not in cancelled)
    learned = worker._replace(pending=None, generation=generation, owned=tuple(owned), runs=runs)
    return released(learned)


def _received(state: State, worker: Worker) -> Worker | None:
    """Return the worker with the next copy that is there for it, None if there is none."""
    if worker.pending is not None:
        return None
    for owned in worker.owned:
        offset = owned.position
        if offset < len(state.hops[owned.partition]):
            moved = owning(worker, owned._replace(position=offset + 1))
            if offset in owned.finished:
                return moved
            run = open_run(worker.generation, owned, offset, state.hops[owned.partition][offset])
            return running(moved, run, run._replace(phase=Phase.QUEUED) if is_busy(worker) else run)
    return None


def _committed(state: State, worker: Worker, owned: Owned) -> Iterator[Move]:
    if worker.assigned is None or worker.generation != state.generation:
        return  # the group refuses it
    offset = committable(owned.first, owned.position, owned.finished)
    if offset is not None and offset != state.committed[owned.partition]:
        shared = state._replace(committed=replaced(state.committed, owned.partition, offset))
        pruned = owned._replace(first=offset, finished=tuple(at for at in owned.finished if at >= offset))
        yield Move(f"commits {owned.partition}:{offset}", shared, owning(worker, pruned))


# Faults from outside.


def _faults(state: State, bounds: Bounds) -> Iterator[Step]:
    for record in sorted(set(state.late)):
        late = list(state.late)
        late.remove(record)
        after = logged(state._replace(late=tuple(late)), record, bounds)
        yield Step(f"late: {record.kind} of {record.epoch}", after, is_due=False)
    if state.left.expiries:
        yield from _expired(state, is_due=False)
    if state.left.failures and any(state.hops):
        left = state.left._replace(failures=state.left.failures - 1)
        refusal = Written(Kind.END, Epoch(REFUSAL_HOP, state.generation), state.next_owner, (), True)
        after = logged(state._replace(left=left, next_owner=state.next_owner + 1), refusal, bounds)
        yield Step("a copy is refused before generation", after, is_due=False)


def _expired(state: State, *, is_due: bool) -> Iterator[Step]:
    """The lease of the other run is over for one that waits."""
    left = state.left if is_due else state.left._replace(expiries=state.left.expiries - 1)
    for at, worker in enumerate(state.workers):
        for run in worker.runs:
            if run.phase is Phase.WAIT:
                after = _with(state._replace(left=left), at, given_up(worker, run))
                yield Step(f"worker {at} waits no longer", after, is_due)


def _with(state: State, at: int, worker: Worker) -> State:
    return state._replace(workers=_sorted(replaced(state.workers, at, worker)))


def _sorted(workers: Sequence[Worker]) -> tuple[Worker, ...]:
    """Workers are alike: only what each of them is counts, not which one it is."""
    return tuple(sorted(workers, key=hash))
