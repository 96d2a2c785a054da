"""The step loop's body: schedule → run → postprocess. Synchronous; one thread owns it.

Knows requests, slots and logits, no event loop. The invariants: whatever one request makes fail, its neighbours go on;
a request that ended, failed or was aborted holds no slot; each gets exactly one final event.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ParamSpec, Protocol

import torch

from schemas.errors import InternalError
from schemas.tokens import FinishReason, TokenLogprob
from workers.generation.engine.admission import bounded_max_tokens
from workers.generation.engine.detokenizer import Detokenizer
from workers.generation.engine.model import DecodeRows, PrefillChunk
from workers.generation.engine.protocol import EngineEvent, EngineRequest, TokenChunk, Tokenizer
from workers.generation.engine.sampler import Sampler
from workers.generation.engine.scheduler import Scheduler, StepPlan
from workers.generation.engine.sequence import ActiveRequest, Phase, Sequence

MAX_FAILED_STEPS = 3  # in a row and with nothing that worked: then it is the engine, not the requests
Emit = Callable[[EngineEvent | Exception], None]
P = ParamSpec("P")


class ModelRunner(Protocol):
    """Runs the model over slots."""

    def forward(self, decode: DecodeRows | None, prefill: PrefillChunk | None) -> torch.Tensor:
        """Return logits `(num_decode + 1 if prefill, vocab)` fp32 on the CPU. May be repeated after a failure."""
        ...

    def fork(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` positions of a slot to another."""
        ...

    def clear(self, slot: int) -> None:
        """Forget what stands in a slot: a failure may have left numbers there that are not finite."""
        ...


class EngineCore:
    """All requests of one engine."""

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_context: int,
        num_slots: int,
        prefill_chunk: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._runner = runner
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_context = max_context
        self._clock = clock
        self._failed_steps = 0
        self.scheduler = Scheduler(num_slots=num_slots, prefill_chunk=prefill_chunk)
        self.num_finished = 0

    @property
    def is_idle(self) -> bool:
        """Say whether nothing is in flight."""
        return not self.scheduler.num_running and not self.scheduler.num_waiting

    def add(self, request: EngineRequest, emit: Emit) -> ActiveRequest | None:
        """Queue a request that `check_request` has passed. None: it is over already, and `emit` has its end.

        What an earlier run has drawn goes out here; the model reads it before it draws on.
        """
        try:
            active = self._active(request, emit)
            self._replay(active)
        except Exception as error:  # one request's settings must not stop the engine
            emit(_request_error(error))
            return None
        if not active.unfinished:
            self._finish(active)
            return None
        self.scheduler.add(active)
        return active

    def abort(self, active: ActiveRequest) -> None:
        """End a request now. One that is over is left alone."""
        if active.phase is Phase.DONE:
            return
        for sequence in active.unfinished:
            sequence.finish(FinishReason.ABORT)
        self._finish(active)

    @torch.inference_mode()
    def step(self) -> bool:
        """Run one step; False if there is nothing to run.

        Raises RuntimeError if the model fails for every request, again and again.
        """
        plan = self.scheduler.schedule(self._clock())
        if plan.is_empty:
            return False
        results = self._run_isolated(plan)
        self._failed_steps = (
            0 if any(isinstance(result, torch.Tensor) for _, result in results) else self._failed_steps + 1
        )
        for part, result in results:
            self._postprocess(part, result)
        if self._failed_steps >= MAX_FAILED_STEPS:
            raise RuntimeError(f"{MAX_FAILED_STEPS} steps in a row failed for every request")
        return True

    def _active(self, request: EngineRequest, emit: Emit) -> ActiveRequest:
        return ActiveRequest(
            request=request,
            sequences=tuple(self._sequence(request, index) for index in range(request.sampling.n)),
            max_tokens=bounded_max_tokens(request, self._max_context),
            emit=emit,
            submitted_s=self._clock(),
        )

    def _sequence(self, request: EngineRequest, index: int) -> Sequence:
        sampler = Sampler(request.sampling, request.prompt, index=index, vocab_size=self._vocab_size)
        detokenizer = Detokenizer(request.sampling.stop)
        return Sequence(index=index, prompt=request.prompt, sampler=sampler, detokenizer=detokenizer)

    def _replay(self, active: ActiveRequest) -> None:
        """Take each choice's given tokens as if they were drawn now, up to where it ends."""
        for sequence, token_ids in zip(active.sequences, active.request.output, strict=False):
            for token_id in token_ids:
                if sequence.end is None:
                    sequence.sampler.note(token_id)
                    self._append(active, sequence, token_id, None)

    # Run

    def _run_isolated(self, plan: StepPlan) -> list[tuple[StepPlan, torch.Tensor | Exception]]:
        """Run a step; if it fails, run each of its parts alone, so that only those that fail alone are lost."""
        result = self._run(plan)
        parts = _split(plan)
        if isinstance(result, torch.Tensor) or len(parts) == 1:
            return [(plan, result)]
        return [(part, self._run(part)) for part in parts]

    def _run(self, plan: StepPlan) -> torch.Tensor | Exception:
        decode = prefill = None
        if plan.decode:
            sequences = [sequence for _, sequence in plan.decode]
            decode = DecodeRows(
                token_ids=tuple(sequence.output[-1] for sequence in sequences),
                slots=tuple(sequence.slot for sequence in sequences),
                positions=tuple(sequence.length for sequence in sequences),
            )
        if plan.prefill is not None:
            _, read = plan.prefill
            prefill = PrefillChunk(token_ids=read.pending(plan.prefill_end), slot=read.slot, start=read.length)
        try:
            return self._runner.forward(decode, prefill)
        except Exception as error:  # out of memory, a kernel's refusal: told to those it hits
            return error

    # Postprocess

    def _postprocess(self, plan: StepPlan, result: torch.Tensor | Exception) -> None:
        if isinstance(result, Exception):
            for active in {id(active): active for active in _owners(plan)}.values():
                self._fail(active, result)
            return
        for row, (active, sequence) in enumerate(plan.decode):
            sequence.length += 1
            self._guarded(active, self._advance, active, sequence, result[row])
        if plan.prefill is not None:
            active, sequence = plan.prefill
            self._guarded(active, self._prefilled, active, sequence, plan.prefill_end, result[-1])

    def _guarded(self, active: ActiveRequest, function: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Let a request fail alone: at its settings, its tokens or its text, not at its neighbours'."""
        try:
            function(*args, **kwargs)
        except Exception as error:
            self._fail(active, error)

    def _prefilled(self, active: ActiveRequest, sequence: Sequence, end: int, logits: torch.Tensor) -> None:
        """Note a chunk; at the prompt's end give every choice its copy. Who has read all draws on."""
        if active.phase is Phase.DONE:  # another choice of the request has failed in this step
            return
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("the model returned logits that are not finite")
        sequence.length = end
        readers = [sequence]
        if active.phase is Phase.PREFILL and end == len(sequence.prompt):
            active.phase, readers = Phase.DECODE, active.unfinished
            for other in readers[1:]:
                self._runner.fork(sequence.slot, other.slot, end)
                other.length = end
        for reader in readers:
            if not reader.num_pending:
                self._advance(active, reader, logits)

    def _advance(self, active: ActiveRequest, sequence: Sequence, logits: torch.Tensor) -> None:
        """Draw a choice's next token and publish it."""
        if active.phase is Phase.DONE:  # another choice of the request has failed in this step
            return
        token_id, logprob = sequence.sampler.sample(logits, len(sequence.output))
        if active.first_token_s is None:
            active.first_token_s = self._clock()
        self._append(active, sequence, token_id, logprob)
        if sequence.end is not None:
            self.scheduler.release(sequence)
            if not active.unfinished:
                self._finish(active)

    def _append(self, active: ActiveRequest, sequence: Sequence, token_id: int, logprob: TokenLogprob | None) -> None:
        """Lengthen a choice by a token and publish it."""
        sequence.output.append(token_id)
        text = self._text(active, sequence, token_id)
        active.emit(_chunk(sequence.index, text, token_id, logprob))

    def _text(self, active: ActiveRequest, sequence: Sequence, token_id: int) -> str:
        """Return what the token lets out, and end the choice where it is the last one."""
        sampling, detokenizer = active.request.sampling, sequence.detokenizer
        if token_id in sampling.stop_token_ids:
            sequence.finish(FinishReason.STOP, token_id)
            return detokenizer.flush()
        if token_id in self._tokenizer.eos_token_ids:
            sequence.finish(FinishReason.STOP)
            return detokenizer.flush()
        text = detokenizer.push(self._tokenizer.token_bytes(token_id))
        is_last = len(sequence.output) >= active.max_tokens
        if is_last and detokenizer.matched is None:
            text += detokenizer.flush()
        if detokenizer.matched is not None:
            sequence.finish(FinishReason.STOP, detokenizer.matched)
        elif is_last:
            sequence.finish(FinishReason.LENGTH)
        return text

    def _finish(self, active: ActiveRequest) -> None:
        self.scheduler.remove(active)
        self.num_finished += 1
        active.emit(active.finished(self._clock()))

    def _fail(self, active: ActiveRequest, error: Exception) -> None:
        if active.phase is Phase.DONE:
            return
        for sequence in active.sequences:
            if sequence.slot >= 0:
                self._runner.clear(sequence.slot)
        self.scheduler.remove(active)
        self.num_finished += 1
        active.emit(_request_error(error))


def _split(plan: StepPlan) -> list[StepPlan]:
    parts = [StepPlan(decode=(pair,)) for pair in plan.decode]
    if plan.prefill is not None:
        parts.append(StepPlan(prefill=plan.prefill, prefill_end=plan.prefill_end))
    return parts


def _owners(plan: StepPlan) -> list[ActiveRequest]:
    owners = [active for active, _ in plan.decode]
    return owners if plan.prefill is None else [*owners, plan.prefill[0]]


def _chunk(index: int, text: str, token_id: int, logprob: TokenLogprob | None) -> TokenChunk:
    logprobs = None if logprob is None else (logprob,)
    return TokenChunk(index=index, text=text, token_ids=(token_id,), logprobs=logprobs)


def _request_error(error: Exception) -> InternalError:
    failure = InternalError(f"the engine could not run this request: {error}")
    failure.__cause__ = error
    return failure
