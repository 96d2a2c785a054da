"""An engine without a model: it streams what a script says, under the same contract.

For flow tests and benches of everything around the engine. Deterministic: a token is one byte of UTF-8, the pace comes
from an injected `pause`. Needs no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from schemas.errors import EngineUnavailableError, InternalError, InvalidRequestError, RejectedError
from schemas.tokens import FinishReason, Usage
from streams.clock import now_ms
from workers.generation.engine.admission import bounded_max_tokens, check_request
from workers.generation.engine.detokenizer import Detokenizer
from workers.generation.engine.protocol import (
    ChoiceEnd,
    EngineIdentity,
    EngineRequest,
    EngineStatistics,
    Finished,
    TokenChunk,
)
from workers.generation.engine.stream import QueuedStream

END_OF_SEQUENCE = 256
VOCABULARY_SIZE = 512
CONTROL_NAMES = ("<|im_start|>", "<|im_end|>")
Script = Callable[[EngineRequest], str]


class ByteTokenizer:
    """One token for each byte of UTF-8; 256 ends an answer, control tokens come after it."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """Return the ids that end an answer."""
        return frozenset({END_OF_SEQUENCE})

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the bytes of the text."""
        return tuple(text.encode("utf-8", "replace"))

    def encode_control(self, text: str) -> tuple[int, ...]:
        """Return the bytes of the text, with one id for each name of a control token."""
        for place, name in enumerate(CONTROL_NAMES):
            before, found, after = text.partition(name)
            if found:
                control_id = END_OF_SEQUENCE + 1 + place
                return (*self.encode_control(before), control_id, *self.encode_control(after))
        return self.encode(text)

    def count(self, text: str) -> int:
        """Return the number of bytes."""
        return len(self.encode(text))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text without control tokens."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte, nothing for control tokens."""
        return bytes([token_id]) if 0 <= token_id < END_OF_SEQUENCE else b""


async def _no_pause() -> None:
    await asyncio.sleep(0)


class FakeEngine:
    """Streams `script(request)` for every choice, a byte at a time, waiting for `pause` before each."""

    def __init__(
        self,
        script: str | Script = "The answer.",
        *,
        pause: Callable[[], Awaitable[None]] = _no_pause,
        max_sequences: int = 64,
        max_context: int = 65_536,
        max_waiting: int = 256,
    ) -> None:
        self._script: Script = (lambda request: script) if isinstance(script, str) else script
        self._pause = pause
        self._slots = asyncio.Semaphore(max_sequences)
        self._max_sequences = max_sequences
        self._max_in_flight = max_sequences + max_waiting
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._running = 0
        self._statistics = EngineStatistics()
        self._is_running = False
        self._failure = ""
        self._max_context = max_context
        self.requests: list[EngineRequest] = []  # all that were accepted, for tests

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
        limits = {"max_context": self._max_context, "max_sequences": self._max_sequences}
        check_request(request, vocab_size=VOCABULARY_SIZE, **limits)
        if len(self._tasks) >= self._max_in_flight:
            raise RejectedError("the engine's queue is full", retry_after_s=1.0)
        stream = QueuedStream(request.request_id)
        self.requests.append(request)
        choices = [
            _Choice(request, index, self._script(request), self._max_context) for index in range(request.sampling.n)
        ]
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
        return EngineStatistics(
            running=self._running,
            waiting=max(0, len(self._tasks) - self._running),
            last_step_ms=self._statistics.last_step_ms,
            num_steps=self._statistics.num_steps,
            num_finished=self._statistics.num_finished,
            free_slots=self._max_sequences - self._running,
            failure=self._failure,
        )

    async def stop(self) -> None:
        """End what runs with EngineUnavailableError. Idempotent."""
        self._is_running = False
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _end(
        self, request: EngineRequest, choices: Sequence[_Choice], stream: QueuedStream, done: asyncio.Task[None]
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
        stream.push(_finished(request, choices))
        self._count(num_finished=1)

    async def _write(self, choices: Sequence[_Choice], stream: QueuedStream) -> None:
        async with self._slots:
            self._running += 1
            try:
                while any(choice.end is None for choice in choices):
                    await self._pause()
                    self._step(choices, stream)
            finally:
                self._running -= 1

    def _step(self, choices: Sequence[_Choice], stream: QueuedStream) -> None:
        for choice in choices:
            if choice.end is None:
                stream.push(choice.advance())
        self._count(num_steps=1)

    def _count(self, *, num_steps: int = 0, num_finished: int = 0) -> None:
        before = self._statistics
        self._statistics = EngineStatistics(
            last_step_ms=now_ms(),
            num_steps=before.num_steps + num_steps,
            num_finished=before.num_finished + num_finished,
        )


class _Choice:
    def __init__(self, request: EngineRequest, index: int, text: str, max_context: int) -> None:
        self._index = index
        self._token_ids = (*ByteTokenizer().encode(text), END_OF_SEQUENCE)
        self._max_tokens = bounded_max_tokens(request, max_context)
        self._stop_ids = request.sampling.stop_token_ids
        self._detokenizer = Detokenizer(request.sampling.stop)
        self.num_tokens = 0
        self.end: ChoiceEnd | None = None

    def advance(self) -> TokenChunk:
        token_id = self._token_ids[self.num_tokens]
        self.num_tokens += 1
        if token_id == END_OF_SEQUENCE or token_id in self._stop_ids:
            self._finish(FinishReason.STOP, None if token_id == END_OF_SEQUENCE else token_id)
            return self._chunk(token_id, self._detokenizer.flush())
        text = self._detokenizer.push(bytes([token_id]))
        is_last = self.num_tokens >= self._max_tokens
        if is_last and self._detokenizer.matched is None:
            text += self._detokenizer.flush()
        if self._detokenizer.matched is not None:
            self._finish(FinishReason.STOP, self._detokenizer.matched)
        elif is_last:
            self._finish(FinishReason.LENGTH)
        return self._chunk(token_id, text)

    def abort(self) -> None:
        if self.end is None:
            self._finish(FinishReason.ABORT)

    def _finish(self, reason: FinishReason, stop_reason: str | int | None = None) -> None:
        self.end = ChoiceEnd(
            index=self._index, finish_reason=reason, num_tokens=self.num_tokens, stop_reason=stop_reason
        )

    def _chunk(self, token_id: int, text: str) -> TokenChunk:
        return TokenChunk(index=self._index, text=text, token_ids=(token_id,))


def _finished(request: EngineRequest, choices: Sequence[_Choice]) -> Finished:
    usage = Usage(prompt_tokens=len(request.prompt), completion_tokens=sum(choice.num_tokens for choice in choices))
    return Finished(choices=tuple(choice.end for choice in choices if choice.end is not None), usage=usage)
