"""The step loop's body: schedule → run → postprocess. Synchronous; one thread owns it.

Knows requests, blocks and logits, no event loop. The invariants: whatever one request makes fail, its neighbours go on;
a request that ended, failed or was aborted holds no block; each gets exactly one final event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Ordered

import torch

from schemas.errors import GeaError, InternalError
from schemas.tokens import FinishReason
from streams.clock import now_ms
from workers.generation.engine.admission import bounded_max_tokens
from workers.generation.engine.batch import ModelRunner
from workers.generation.engine.detokenizer import Detokenizer
from workers.generation.engine.isolation import Part, run_isolated
from workers.generation.engine.kv_cache import root_digest
from workers.generation.engine.limits import Limits
from workers.generation.engine.output import OutputWriter
from workers.generation.engine.pace import Pace
from workers.generation.engine.plan import StepPlan
from workers.generation.engine.postprocess import Postprocess
from workers.generation.engine.protocol import EngineRequest, Tokenizer
from workers.generation.engine.sampler_state import SamplerState
from workers.generation.engine.scheduler import Scheduler
from workers.generation.engine.sequence import ActiveRequest, Constraint, Emit, Sequence, State
from workers.generation.engine.statistics import EngineStatistics

MAX_FAILED_STEPS = 3  # in a row and with nothing that worked: then it is the engine, not the requests


class EngineCore:
    """All requests of one engine."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        *,
        max_context: int,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._max_context = max_context
        self._clock = clock
        self.scheduler = Scheduler(runner.layout, limits)
        self._writer = OutputWriter(tokenizer)
        self._postprocess = Postprocess(self.scheduler, self._writer, self, clock)
        self._pace = Pace()
        self._batch_size = self._step_tokens = 0
        self._last_step_ms = 0
        self._failed_steps = 0
        self._num_requests = 0
        self._swap_ops = 0
        self.num_finished = 0

    @property
    def is_idle(self) -> bool:
        """Say whether nothing is in flight."""
        return not self.scheduler.num_requests

    def add(self, request: EngineRequest, emit: Emit, constraint: Constraint | None = None) -> ActiveRequest | None:
        """Queue a request that `check_request` has passed. None: it is over already, and `emit` has its end.

        `constraint` is the compiled form of its answers; each choice goes on in its own copy. What an earlier run has
        drawn goes out here; the model reads it before it draws on.
        """
        try:
            active = self._active(request, emit, constraint)
            for sequence, output in zip(active.sequences, request.output, strict=False):
                self._writer.replay(sequence, output)
        except Exception as error:  # one request's settings must not stop the engine
            emit(_request_error(error))
            return None
        if not active.unfinished:
            self.finish(active)
            return None
        self.scheduler.add(active)
        return active

    def abort(self, active: ActiveRequest) -> None:
        """End a request now. One that is over is left alone."""
        if active.is_done:
            return
        for sequence in active.unfinished:
            sequence.finish(FinishReason.ABORT)
        self.finish(active)

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one step; False if there is nothing to run.

        Raises RuntimeError if the model fails for every request, again and again.
        """
        started_s = time.perf_counter()
        self._clear()
        plan = self.scheduler.schedule(self._clock())
        self._move(plan)
        if plan.is_empty:
            return False
        parts, num_too_many = run_isolated(self._runner.forward, plan.scheduled)
        num_drawn = self._postprocess.num_drawn
        for part in parts:
            self._settle(part)
        self._note(plan, started_s, self._postprocess.num_drawn - num_drawn)
        self._judge(parts, num_too_many)
        return True

    def finish(self, request: ActiveRequest) -> None:
        """End a request whose choices have all ended."""
        finished = request.finished(self._clock())
        self.scheduler.remove(request)
        self.num_finished += 1
        request.emit(finished)

    def fail(self, request: ActiveRequest, error: Exception) -> None:
        """End a request with an error; one that is over is left alone."""
        if request.is_done:
            return
        self.scheduler.remove(request)
        self.num_finished += 1
        request.emit(_request_error(error))

    def statistics(self) -> EngineStatistics:
        """Return what the engine does now."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        positions = pool.num_active * pool.block_size
        return EngineStatistics(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            tokens_in_flight=scheduler.tokens_in_flight,
            batch_size=self._batch_size,
            step_tokens=self._step_tokens,
            step_ms=self._pace.step_ms,
            tokens_per_s=self._pace.tokens_per_s,
            last_step_ms=self._last_step_ms,
            num_steps=self._pace.num_steps,
            num_finished=self.num_finished,
            num_prompt_tokens=scheduler.prefix_queries,
            num_generation_tokens=self._postprocess.num_drawn,
            num_preemptions=scheduler.num_preemptions,
            num_draft_tokens=self._postprocess.num_draft_tokens,
            num_accepted_tokens=self._postprocess.num_accepted_tokens,
            swap_ops=self._swap_ops,
            active_blocks=pool.num_active,
            cached_blocks=pool.num_idle,
            total_blocks=pool.num_blocks,
            fragmentation=min(1.0, scheduler.num_unused_positions / positions) if positions else 0.0,
            allocator_slack_bytes=self._runner.allocator_slack_bytes(),
            prefix_queries=scheduler.prefix_queries,
            prefix_hits=scheduler.prefix_hits,
        )

    def _active(self, request: EngineRequest, emit: Emit, constraint: Constraint | None) -> ActiveRequest:
        self._num_requests += 1
        layout = self._runner.layout
        active = ActiveRequest(
            request=request,
            max_tokens=bounded_max_tokens(request, self._max_context, layout),
            emit=emit,
            arrival=self._num_requests,
            root=root_digest(layout.identity, request.cache_salt),
            submitted_s=self._clock(),
        )
        active.sequences = tuple(self._sequence(active, index, constraint) for index in range(request.sampling.n))
        return active

    def _sequence(self, active: ActiveRequest, index: int, constraint: Constraint | None) -> Sequence:
        request = active.request
        return Sequence(
            request=active,
            index=index,
            key=(request.priority, active.arrival, index),
            tokens=list(request.prompt),
            sampler=SamplerState(request.sampling, request.prompt, index=index, vocab_size=self._runner.vocab_size),
            detokenizer=Detokenizer(request.sampling.stop),
            constraint=None if constraint is None else constraint.fork(),
        )

    def _clear(self) -> None:
        """Clear what failed requests have left, before anybody gets it."""
        if dirty := self.scheduler.pool.clean():
            self._runner.cache.clear_blocks(dirty)

    def _move(self, plan: StepPlan) -> None:
        """Carry blocks to host memory, from one to another, and back, in this order; then only who is whole runs."""
        for sequence, blocks in plan.swap_out:
            self._swap_out(sequence, blocks)
        for sequence, source, target in plan.copies:
            self._guarded(sequence, self._runner.cache.copy_block, source, target)
        for sequence in plan.swap_in:
            self._swap_ops += 1
            self._guarded(
                sequence,
                self._runner.cache.write_blocks,
                sequence.block_table[: sequence.num_swapped],
                sequence.swapped,
            )
            self.scheduler.forget_swapped(sequence)
        if plan.copies or plan.swap_in:
            plan.scheduled = [item for item in plan.scheduled if item.sequence.state is State.RUNNING]

    def _swap_out(self, sequence: Sequence, blocks: Ordered[int]) -> None:
        """Keep a sequence's blocks in host memory. Where there is none left, it is read again."""
        try:
            sequence.swapped = self._runner.cache.read_blocks(blocks)
            self._swap_ops += 1
        except Exception:
            self.scheduler.forget_swapped(sequence)

    def _guarded(self, sequence: Sequence, move: Callable[..., None], *args: object) -> None:
        """Let a failure end only the request that it happened to."""
        try:
            move(*args)
        except Exception as error:
            if sequence.state is State.RUNNING:
                self.scheduler.taint_all(sequence.request)
            self.fail(sequence.request, error)

    def _settle(self, part: Part) -> None:
        """Take what ran together on; what failed alone ends."""
        if isinstance(part.result, torch.Tensor):
            self._postprocess.run(part.items, part.result)
            return
        for item in part.items:
            if item.sequence.state is State.RUNNING:
                self.scheduler.taint(item.sequence)
                self.fail(item.sequence.request, part.result)

    def _note(self, plan: StepPlan, started_s: float, num_drawn: int) -> None:
        self._batch_size, self._step_tokens = len(plan.scheduled), plan.num_rows
        self._last_step_ms = now_ms()
        self._pace.note((time.perf_counter() - started_s) * 1e3, num_drawn)

    def _judge(self, parts: Ordered[Part], num_too_many: int) -> None:
        """Make the next steps smaller after one that was too large; give up on a model that fails for everybody."""
        if num_too_many:
            self.scheduler.budget.lower(num_too_many)
        else:
            self.scheduler.budget.note_success()
        has_run = any(isinstance(part.result, torch.Tensor) for part in parts)
        self._failed_steps = 0 if has_run else self._failed_steps + 1
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed for every request")


def _request_error(error: Exception) -> GeaError:
    if isinstance(error, GeaError):  # it says itself what is to be done about it
        return error
    failure = InternalError(f"the engine could not run this request: {error}")
    failure.__cause__ = error
    return failure
