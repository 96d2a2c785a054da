"""Decides what one step runs: the next token of every decoding sequence, and a chunk of one that has more to read.

Pure bookkeeping over slots and requests: no tensors, no clock of its own, no threads. Invariants: requests are admitted
in their order; each holds as many slots as it has unfinished choices; a request that is done holds none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from workers.generation.engine.kv_cache import SlotPool
from workers.generation.engine.sequence import ActiveRequest, Phase, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """What one step runs. The sequence in `prefill` reads its pending tokens up to position `prefill_end`."""

    decode: tuple[tuple[ActiveRequest, Sequence], ...] = ()
    prefill: tuple[ActiveRequest, Sequence] | None = None
    prefill_end: int = 0

    @property
    def is_empty(self) -> bool:
        """Say whether there is nothing to run."""
        return not self.decode and self.prefill is None


class Scheduler:
    """Waiting and running requests."""

    def __init__(self, *, num_slots: int, prefill_chunk: int) -> None:
        self._pool = SlotPool(num_slots)
        self._prefill_chunk = prefill_chunk
        self._waiting: deque[ActiveRequest] = deque()
        self._running: list[ActiveRequest] = []

    @property
    def num_waiting(self) -> int:
        """Return how many requests have no slots yet."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Return how many requests hold slots."""
        return len(self._running)

    @property
    def num_free(self) -> int:
        """Return how many slots are free."""
        return self._pool.num_free

    @property
    def tokens_in_flight(self) -> int:
        """Return the positions that stand in the slots of running requests."""
        return sum(sequence.length for request in self._running for sequence in request.unfinished)

    def requests(self) -> tuple[ActiveRequest, ...]:
        """Return everything in flight."""
        return (*self._running, *self._waiting)

    def add(self, request: ActiveRequest) -> None:
        """Queue a request."""
        self._waiting.append(request)

    def schedule(self, now_s: float) -> StepPlan:
        """Admit what has room and return the step. The first request that has no room holds back those behind it."""
        while self._waiting and len(self._waiting[0].unfinished) <= self._pool.num_free:
            self._admit(self._waiting.popleft(), now_s)
        grown = [(r, sequence) for r in self._running if r.phase is Phase.DECODE for sequence in r.unfinished]
        decode = tuple(sorted((pair for pair in grown if pair[1].num_pending == 1), key=lambda pair: pair[1].slot))
        prefill = next((found for request in self._running if (found := _reading(request))), None)
        if prefill is None:
            return StepPlan(decode=decode)
        request, sequence = prefill
        known = len(sequence.prompt) if request.phase is Phase.PREFILL else sequence.num_tokens
        end = min(sequence.length + self._prefill_chunk, known)
        return StepPlan(decode=decode, prefill=prefill, prefill_end=end)

    def release(self, sequence: Sequence) -> None:
        """Free the slot of a choice that ended."""
        if sequence.slot >= 0:
            self._pool.give_back(sequence.slot)
            sequence.slot = -1

    def remove(self, request: ActiveRequest) -> None:
        """Drop a request with all its slots, wherever it is. Idempotent."""
        for sequence in request.sequences:
            self.release(sequence)
        if request in self._running:
            self._running.remove(request)
        elif request in self._waiting:
            self._waiting.remove(request)
        request.phase = Phase.DONE

    def _admit(self, request: ActiveRequest, now_s: float) -> None:
        unfinished = request.unfinished
        for sequence, slot in zip(unfinished, self._pool.take(len(unfinished)), strict=True):
            sequence.slot = slot
        request.phase, request.admitted_s = Phase.PREFILL, now_s
        self._running.append(request)


def _reading(request: ActiveRequest) -> tuple[ActiveRequest, Sequence] | None:
    """Return the choice that has a chunk to read: all share one prompt, then each has its own output."""
    for sequence in request.unfinished:
        if request.phase is Phase.PREFILL or sequence.num_pending > 1:
            return request, sequence
    return None
