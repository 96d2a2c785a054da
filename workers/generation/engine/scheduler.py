"""Decides what one step runs: the newest token of every decoding sequence, then chunks of prompts, then guesses.

Pure bookkeeping over blocks and sequences: no tensors, no clock of its own, no threads. The invariants: sequences are
admitted in the order of their keys; whoever is scheduled in a step is not preempted in it; the sequence with the lowest
key that runs gets every block it needs, so that something always comes to its end.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort

from workers.generation.engine.batch import CacheLayout
from workers.generation.engine.kv_cache import BlockPool
from workers.generation.engine.limits import Limits
from workers.generation.engine.plan import Scheduled, StepPlan
from workers.generation.engine.sequence import ActiveRequest, Sequence, State
from workers.generation.engine.settings import Preemption
from workers.generation.engine.tables import BlockTables
from workers.generation.engine.token_budget import TokenBudget

WATERMARK_SHARE = 100  # one block of so many stays free at admission
DOUBLING_ROWS = 12  # so many rows more take as long as a step with none: measured on CPUs, a GPU has many more


class Scheduler:
    """Waiting and running sequences, and the blocks that they hold."""

    def __init__(self, layout: CacheLayout, limits: Limits) -> None:
        self.pool = BlockPool(layout, has_prefix_cache=limits.has_prefix_cache)
        self._tables = BlockTables(self.pool)
        self.budget = TokenBudget(limits.max_batched_tokens)
        self._limits = limits
        self._requests: dict[ActiveRequest, None] = {}
        self._waiting: list[Sequence] = []  # by key
        self._running: list[Sequence] = []  # by key
        self._step = 0
        self._turn = (0, 0, 0)  # whose row was the last when not all decodes had room
        self._num_host_blocks = 0
        self.num_preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0

    @property
    def num_requests(self) -> int:
        """Return how many requests are in flight."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        """Return how many requests have a choice that runs."""
        return len({sequence.request for sequence in self._running})

    @property
    def num_waiting(self) -> int:
        """Return how many requests have none."""
        return len(self._requests) - self.num_running

    @property
    def tokens_in_flight(self) -> int:
        """Return the positions that stand in the blocks of running sequences."""
        return sum(sequence.num_computed for sequence in self._running)

    @property
    def num_unused_positions(self) -> int:
        """Return the positions of their blocks that hold no token."""
        held = sum(len(sequence.block_table) for sequence in self._running)
        return held * self.pool.block_size - self.tokens_in_flight

    def add(self, request: ActiveRequest) -> None:
        """Queue a request: its first unfinished choice reads the prompt, the others follow."""
        first, *followers = request.unfinished
        self._requests[request] = None
        for follower in followers:
            follower.state = State.FOLLOWING
        first.followers, first.state = followers, State.WAITING
        insort(self._waiting, first, key=_key)

    def schedule(self, now_s: float) -> StepPlan:
        """Return the next step. Blocks are taken and given back as if it had run."""
        self._step += 1
        plan = StepPlan()
        self._schedule_decodes(plan)
        self._schedule_prompts(plan)
        if not plan.num_preempted:
            self._admit(plan, now_s)
        if self._limits.max_draft:
            self._guess(plan)
        return plan

    # What becomes of the sequences that have run

    def advance(self, sequence: Sequence, num_computed: int) -> None:
        """Note that tokens have been read, and let others share the blocks that they fill."""
        sequence.num_computed = num_computed
        self._tables.publish(sequence)

    def fork(self, first: Sequence) -> list[Sequence]:
        """Let the followers of a choice that has read the prompt run on with its blocks."""
        followers, first.followers = first.followers, []
        for follower in followers:
            self._tables.fork(first, follower)
            follower.state = State.RUNNING
            insort(self._running, follower, key=_key)
        return followers

    def release(self, sequence: Sequence) -> None:
        """Free whatever a sequence holds, wherever it is. Idempotent."""
        if sequence.state is State.RUNNING:
            _remove(self._running, sequence)
            self._tables.let_go(sequence)
        elif sequence.state in (State.WAITING, State.SWAPPED):
            _remove(self._waiting, sequence)
            self.forget_swapped(sequence)
        sequence.state = State.ENDED

    def remove(self, request: ActiveRequest) -> None:
        """Drop a request with all that it holds."""
        for sequence in request.sequences:
            self.release(sequence)
        self._requests.pop(request, None)
        request.is_done, request.sequences = True, ()

    def taint(self, sequence: Sequence) -> None:
        """Let nobody read what a failed step may have written: it may not be finite."""
        self._tables.taint(sequence, sequence.num_computed)

    def taint_all(self, request: ActiveRequest) -> None:
        """Let nobody read anything that a request has read: something in it was not finite."""
        for sequence in request.sequences:
            self._tables.taint(sequence, 0)

    def forget_swapped(self, sequence: Sequence) -> None:
        """Free the host memory of a sequence that has come back, or cannot; it is read again unless it runs."""
        self._num_host_blocks -= sequence.num_swapped
        sequence.swapped, sequence.num_swapped = None, 0
        if sequence.state is State.SWAPPED:
            sequence.state, sequence.num_computed, sequence.num_published = State.WAITING, 0, 0

    # The parts of a step

    def _schedule_decodes(self, plan: StepPlan) -> None:
        """Every decoding sequence gets its row; if they are too many, they take turns."""
        ready = [sequence for sequence in self._running if sequence.is_decoding]
        room = self.budget.num_tokens
        if self._waiting or len(ready) < len(self._running):
            room -= min(self.pool.block_size, room // 2)  # so that prompts are never starved
        if len(ready) > room:
            ready = self._in_turn(ready, room)
        for sequence in ready:
            if sequence.state is State.RUNNING:  # not preempted for one before
                if self._make_room(sequence, len(sequence.tokens), plan):
                    self._run(sequence, len(sequence.tokens), plan)
                else:
                    self._preempt(sequence, plan)

    def _in_turn(self, ready: list[Sequence], room: int) -> list[Sequence]:
        """Return as many as there is room for, from the one on whose turn it is."""
        start = bisect_right(ready, self._turn, key=_key)
        chosen = [*ready[start:], *ready[:start]][:room]
        self._turn = chosen[-1].key
        return sorted(chosen, key=_key)

    def _schedule_prompts(self, plan: StepPlan) -> None:
        for sequence in [sequence for sequence in self._running if not sequence.is_decoding]:
            if sequence.state is State.RUNNING:
                self._schedule_chunk(sequence, plan)

    def _schedule_chunk(self, sequence: Sequence, plan: StepPlan) -> None:
        """Read on by a quarter of the whole: long prompts in few steps, short ones without holding up the others."""
        room = self.budget.num_tokens - plan.num_rows
        known = sequence.num_readable
        chunk = max(self.pool.block_size, min(known // 4, self._limits.max_chunk))
        end = min(known, sequence.num_computed + min(chunk, room))
        if end > sequence.num_computed and self._make_room(sequence, end, plan):
            self._run(sequence, end, plan)

    def _run(self, sequence: Sequence, end: int, plan: StepPlan) -> None:
        sequence.last_step = self._step
        is_drawing = end == sequence.num_readable
        plan.add(Scheduled(sequence, sequence.num_computed, end, is_drawing=is_drawing))

    def _admit(self, plan: StepPlan, now_s: float) -> None:
        """Begin what has room. The first that has none holds back those behind it, so that it gets its turn."""
        num_used = sum(1 + len(sequence.followers) for sequence in self._running)
        while self._waiting and plan.num_rows < self.budget.num_tokens:
            sequence = self._waiting[0]
            num_used += 1 + len(sequence.followers)
            hits = self._tables.hits(sequence)
            if num_used > self._limits.max_sequences or not self._has_room(sequence, hits):
                return
            del self._waiting[0]
            self._begin(sequence, hits, plan, now_s)
            self._schedule_chunk(sequence, plan)

    def _begin(self, sequence: Sequence, hits: list[int], plan: StepPlan, now_s: float) -> None:
        if sequence.state is State.SWAPPED:
            self._tables.restore(sequence)
            plan.swap_in.append(sequence)
        else:
            self._tables.begin(sequence, hits)
        sequence.state = State.RUNNING
        insort(self._running, sequence, key=_key)
        request = sequence.request
        if request.admitted_s is None:
            request.admitted_s = now_s
            request.num_cached = min(sequence.num_computed, request.num_prompt)
            self.prefix_queries += request.num_prompt
            self.prefix_hits += request.num_cached

    def _has_room(self, sequence: Sequence, hits: list[int]) -> bool:
        """Say whether a sequence can read all it knows, and the running ones grow a little, without preemption."""
        if not self._running:
            return True  # alone it fits: `check_request` has seen to that
        num_held = sum(1 for block in hits if self.pool.num_refs(block))
        needed = self.pool.num_blocks_for(len(sequence.tokens)) - num_held + len(sequence.followers)
        promised = sum(
            max(0, self.pool.num_blocks_for(other.num_readable) - len(other.block_table)) for other in self._running
        )
        watermark = max(len(self._running), self.pool.num_blocks // WATERMARK_SHARE)
        return needed + promised + watermark <= self.pool.num_free

    def _guess(self, plan: StepPlan) -> None:
        """Fill the step with guessed tokens while rows are nearly free, for those first whose guesses were right."""
        max_rows = min(self._limits.max_speculative_rows, self.budget.num_tokens)
        if plan.num_rows >= max_rows:
            return
        decodes = [item for item in plan.scheduled if item.is_drawing and item.end - item.start == 1]
        for item in sorted(decodes, key=lambda item: -item.sequence.lookup.share):
            item.draft = self._draft(item.sequence, plan.num_rows, max_rows)
            plan.num_rows += len(item.draft)

    def _draft(self, sequence: Sequence, num_rows: int, max_rows: int) -> list[int]:
        """Return guesses that pay, and that the answer and the blocks have room for; nobody is preempted for them.

        A step of r rows takes time as DOUBLING_ROWS + r, so that one row more costs r / (DOUBLING_ROWS + r) of a token.
        """
        max_draft = min(self._limits.max_draft, max_rows - num_rows)
        cost = num_rows / (DOUBLING_ROWS + num_rows)
        wanted = sequence.lookup.num_wanted(len(sequence.tokens), max_draft, cost)
        if not wanted:
            sequence.lookup.pass_over()
        wanted = min(wanted, sequence.request.max_tokens - sequence.num_output - 1)
        if wanted <= 0 or sequence.followers:
            return []
        draft = sequence.lookup.propose(sequence.tokens, wanted)
        num_tokens, table = len(sequence.tokens), sequence.block_table
        num_missing = self.pool.num_blocks_for(num_tokens + len(draft)) - len(table)
        if num_missing > 0:
            if self.pool.num_free - num_missing >= len(self._running):
                table += self.pool.take(num_missing)
            else:
                draft = draft[: len(table) * self.pool.block_size - num_tokens]
        return draft

    # Blocks

    def _make_room(self, sequence: Sequence, end: int, plan: StepPlan) -> bool:
        """Give a sequence the blocks up to `end`, at the cost of those with higher keys that are not scheduled yet.

        False: there is none but itself to take them from.
        """
        while (needed := self._tables.num_missing(sequence, end)) > self.pool.num_free:
            victim = next((s for s in reversed(self._running) if s.last_step != self._step and s.block_table), None)
            if victim is None or victim is sequence:
                return False
            self._preempt(victim, plan)
        if needed:
            plan.copies += self._tables.grow(sequence, end)
        return True

    def _preempt(self, sequence: Sequence, plan: StepPlan) -> None:
        """Take a sequence's blocks. It waits, by its key, and goes on later with the same tokens."""
        _remove(self._running, sequence)
        held = sequence.block_table[: self.pool.num_blocks_for(sequence.num_computed)]
        if self._can_swap(held):
            plan.swap_out.append((sequence, held))
            sequence.state, sequence.num_swapped = State.SWAPPED, len(held)
            self._num_host_blocks += len(held)
        else:
            sequence.state, sequence.num_computed, sequence.num_published = State.WAITING, 0, 0
        self._tables.let_go(sequence)
        insort(self._waiting, sequence, key=_key)
        plan.num_preempted += 1
        self.num_preemptions += 1

    def _can_swap(self, held: list[int]) -> bool:
        fits = self._num_host_blocks + len(held) <= self._limits.swap_blocks
        return self._limits.preemption is Preemption.SWAP and bool(held) and fits and not self.pool.is_tainted(held)


def _key(sequence: Sequence) -> tuple[int, int, int]:
    return sequence.key


def _remove(sequences: list[Sequence], sequence: Sequence) -> None:
    """Remove from a list that is sorted by key; keys are unique."""
    place = bisect_left(sequences, sequence.key, key=_key)
    assert sequences[place] is sequence
    del sequences[place]
