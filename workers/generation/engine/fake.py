"""An engine without a model: it streams what a script says, under the same contract.

For flow tests and benches of everything around the engine. Deterministic: a token is one byte of UTF-8, the pace comes
from an injected `pause`. An answer that was begun elsewhere goes on where its tokens end. Needs no torch.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence

from schemas.errors import EngineUnavailableError, InternalError, InvalidRequestError, RejectedError
from streams.clock import now_ms
from streams.racing import end_tasks
from workers.generation.engine.admission import check_request
from workers.generation.engine.byte_tokenizer import VOCABULARY_SIZE, ByteTokenizer
from workers.generation.engine.pace import Pace
from workers.generation.engine.protocol import EngineIdentity, EngineRequest
from workers.generation.engine.scripted_choice import Script, ScriptedChoice, finished
from workers.generation.engine.statistics import EngineStatistics
from workers.generation.engine.stream import QueuedStream

NUM_KEPT = 10_000
Pause = Callable[[], Awaitable[None]]


async def _no_pause() -> None:
    await asyncio.sleep(0)


def paced(ms_per_token: float) -> Pause:
    """Return a pause that lasts as long as one step of a model does."""

    async def pause() -> None:
        await asyncio.sleep(ms_per_token / 1e3)

    return pause


class FakeEngine:
    """Streams `script(request, index)` for every choice, a byte at a time, waiting for `pause` before each."""

    def __init__(
        self,
        script: str | Script = "The answer.",
        *,
        pause: Pause = _no_pause,
        max_sequences: int = 64,
        max_context: int = 65_536,
        max_waiting: int = 256,
    ) -> None:
        self._script: Script = (lambda request, index: script) if isinstance(script, str) else script
        self._pause = pause
        self._slots = asyncio.Semaphore(max_sequences)
        self._max_sequences = max_sequences
        self._max_in_flight = max_sequences + max_waiting
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running: list[Sequence[ScriptedChoice]] = []
        self._pace = Pace()
        self._last_step_ms = self._num_finished = self._num_drawn = 0
        self._is_running = False
        self._failure = ""
        self._max_context = max_context
        self.requests: deque[EngineRequest] = deque(maxlen=NUM_KEPT)  # the last that were accepted, for tests

    @property
    def identity(self) -> EngineIdentity:
        """Return what shapes the text."""
        return EngineIdentity(
            engine="fake",
            model="fake",
            weights_hash="0" * 64,
            tokenizer_hash="0" * 64,
            precision="none",
            max_context=self._max_context,
        )

    @property
    def tokenizer(self) -> ByteTokenizer:
        """Return the tokenizer."""
        return ByteTokenizer()

    async def start(self) -> None:
        """Be ready."""
        self._is_running = True

    def submit(self, request: EngineRequest) -> QueuedStream:
        """Start a stream; errors as `Engine.submit`."""
        if not self._is_running:
            raise EngineUnavailableError(self._failure or "the engine is not running")
        if request.request_id in self._tasks:
            raise InvalidRequestError(f"request_id: {request.request_id} is already in flight", field="request_id")
        check_request(
            request,
            vocab_size=VOCABULARY_SIZE,
            max_context=self._max_context,
            max_sequences=self._max_sequences,
        )
        if len(self._tasks) >= self._max_in_flight:
            raise RejectedError("the engine's queue is full", retry_after_s=1.0)
        stream = QueuedStream(request.request_id)
        self.requests.append(request)
        choices = [
            ScriptedChoice(request, index, self._script(request, index), self._max_context)
            for index in range(request.sampling.n)
        ]
        for choice in choices:
            for chunk in choice.replay():
                stream.push(chunk)
        task = asyncio.create_task(self._write(choices, stream))
        self._tasks[request.request_id] = task
        task.add_done_callback(lambda done: self._end(request, choices, stream, done))
        return stream

    def abort(self, request_id: str) -> None:
        """Stop a request at its next token; its stream ends with `abort`. The id may be used again at once."""
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()

    def die(self, reason: str) -> None:
        """Fail as an engine whose thread died: every stream raises, and so does `submit`."""
        self._failure, self._is_running = reason, False
        for task in list(self._tasks.values()):
            task.cancel()

    def statistics(self) -> EngineStatistics:
        """Return what the engine does now."""
        running, pace = len(self._running), self._pace
        growing = [choice for choices in self._running for choice in choices if not choice.end]
        return EngineStatistics(
            running=running,
            waiting=max(0, len(self._tasks) - running),
            tokens_in_flight=sum(choice.length for choice in growing),
            batch_size=len(growing),
            step_ms=pace.step_ms,
            tokens_per_s=pace.tokens_per_s * running,
            last_step_ms=self._last_step_ms,
            num_steps=pace.num_steps,
            num_finished=self._num_finished,
            num_generation_tokens=self._num_drawn,
            failure=self._failure,
        )

    async def stop(self) -> None:
        """End what runs with EngineUnavailableError. Idempotent."""
        self._is_running = False
        await end_tasks(*self._tasks.values())

    def _end(
        self, request: EngineRequest, choices: Sequence[ScriptedChoice], stream: QueuedStream, done: asyncio.Task[None]
    ) -> None:
        """Say how it ended; a task may be cancelled before it ran at all."""
        if self._tasks.get(request.request_id) is done:
            del self._tasks[request.request_id]
        if done.cancelled() and not self._is_running:
            stream.push(EngineUnavailableError(self._failure or "the engine has stopped"))
            return
        if not done.cancelled() and (error := done.exception()) is not None:
            stream.push(InternalError(f"the engine could not run this request: {error}"))
            return
        for choice in choices:
            choice.abort()  # those that have not ended
        stream.push(finished(request, choices))
        self._num_finished += 1

    async def _write(self, choices: Sequence[ScriptedChoice], stream: QueuedStream) -> None:
        if all(choice.end for choice in choices):
            return  # over already when it came: no slot, no step
        async with self._slots:
            self._running.append(choices)
            try:
                while not all(choice.end for choice in choices):
                    started_s = time.perf_counter()
                    await self._pause()
                    num_drawn = self._step(choices, stream)
                    self._note((time.perf_counter() - started_s) * 1e3, num_drawn)
            finally:
                self._running.remove(choices)

    def _step(self, choices: Sequence[ScriptedChoice], stream: QueuedStream) -> int:
        """Draw a token for every choice that grows; return how many."""
        growing = [choice for choice in choices if choice.end is None]
        for choice in growing:
            stream.push(choice.advance())
        return len(growing)

    def _note(self, step_ms: float, num_drawn: int) -> None:
        self._pace.note(step_ms, num_drawn)
        self._num_drawn += num_drawn
        self._last_step_ms = now_ms()
