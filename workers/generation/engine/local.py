"""The in-process engine: a thread of its own runs the step loop, the event loop only exchanges messages with it.

Knows the model folder and threads; what a step does is `core`'s. The invariants: no method waits for the model; events
reach the loop in order, one hand-over per step; if the thread dies, every open stream raises EngineUnavailableError.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog

from schemas.errors import EngineUnavailableError, GeaError, InvalidRequestError, RejectedError
from streams.clock import now_ms
from workers.generation.engine.admission import check_request
from workers.generation.engine.core import EngineCore
from workers.generation.engine.loader import Loaded, load
from workers.generation.engine.protocol import (
    EngineEvent,
    EngineIdentity,
    EngineRequest,
    EngineStatistics,
    Finished,
    Tokenizer,
)
from workers.generation.engine.sequence import ActiveRequest
from workers.generation.engine.settings import LocalEngineSettings
from workers.generation.engine.stream import QueuedStream

STOP_TIMEOUT_S = 10.0  # a step takes well below a second; a stuck one must not hold up the process
STOPPED = "the engine has stopped"
SMOOTHING = 0.1  # weight of the newest step in `step_ms`

_log = structlog.get_logger(__name__)
Delivery = tuple[int, EngineEvent | Exception]


@dataclass(frozen=True, slots=True)
class _Add:
    ticket: int
    request: EngineRequest


@dataclass(frozen=True, slots=True)
class _Abort:
    ticket: int


class LocalEngine:
    """Runs one model in this process. `load_model` is called in the engine's thread (tests give their own)."""

    def __init__(
        self,
        folder: Path,
        settings: LocalEngineSettings = LocalEngineSettings(),  # noqa: B008 (frozen)
        *,
        load_model: Callable[[Path, LocalEngineSettings], Loaded] = load,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._load = load_model
        self._thread: threading.Thread | None = None
        self._inbox: deque[_Add | _Abort] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._failure = ""
        self._statistics = EngineStatistics()
        self._loaded: Loaded | None = None
        self._streams: dict[int, QueuedStream] = {}  # by ticket; touched by the event loop's thread only
        self._tickets: dict[str, int] = {}  # request_id to ticket, of requests that may still be aborted
        self._next_ticket = 0
        self._active: dict[int, ActiveRequest] = {}  # by ticket; touched by the engine's thread only
        self._outbox: list[Delivery] = []  # likewise

    # The event loop's side

    @property
    def identity(self) -> EngineIdentity:
        """Return what shapes the text. Known after `start`."""
        return self._ready().identity

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Known after `start`."""
        return self._ready().tokenizer

    async def start(self) -> None:
        """Load and warm. Raises ConfigError for a model that cannot run, EngineUnavailableError if loading failed."""
        assert self._thread is None, "an engine starts once"
        self._loop = asyncio.get_running_loop()
        started: asyncio.Future[None] = self._loop.create_future()
        self._thread = threading.Thread(target=self._main, args=(started,), name="gea-engine", daemon=True)
        self._thread.start()
        await started

    def submit(self, request: EngineRequest) -> QueuedStream:
        """Queue a request; errors as `Engine.submit`."""
        loaded = self._ready()
        if self._failure or self._is_stopping:
            raise EngineUnavailableError(self._failure or "the engine is stopping")
        if request.request_id in self._tickets:
            raise InvalidRequestError(f"request_id: {request.request_id} is already in flight", field="request_id")
        check_request(
            request,
            vocab_size=loaded.vocab_size,
            max_context=loaded.identity.max_context,
            max_sequences=self._settings.max_sequences,
        )
        if len(self._streams) >= self._settings.max_sequences + self._settings.max_waiting:
            raise RejectedError(f"the engine's queue of {self._settings.max_waiting} is full", retry_after_s=1.0)
        self._next_ticket += 1
        stream = QueuedStream(request.request_id)
        self._streams[self._next_ticket] = stream
        self._tickets[request.request_id] = self._next_ticket
        self._post(_Add(self._next_ticket, request))
        return stream

    def abort(self, request_id: str) -> None:
        """Stop a request within one step. Unknown ids are ignored; the id may be used again at once."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is not None:
            self._post(_Abort(ticket))

    def statistics(self) -> EngineStatistics:
        """Return what the engine does now."""
        posted = sum(isinstance(command, _Add) for command in tuple(self._inbox))
        return replace(self._statistics, waiting=self._statistics.waiting + posted, failure=self._failure)

    async def stop(self) -> None:
        """End what runs with EngineUnavailableError and free everything. Idempotent."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
        self._fail_streams(STOPPED)
        self._loaded = None  # weights and cache with it

    def _ready(self) -> Loaded:
        if self._loaded is None:
            state = STOPPED if self._is_stopping else "the engine has not started"
            raise EngineUnavailableError(self._failure or state)
        return self._loaded

    def _post(self, command: _Add | _Abort) -> None:
        with self._wake:
            self._inbox.append(command)
            self._wake.notify()

    def _deliver(self, batch: list[Delivery]) -> None:
        for ticket, event in batch:
            stream = self._streams.get(ticket)
            if stream is None:
                continue
            stream.push(event)
            if isinstance(event, Finished | Exception):
                self._forget(ticket)

    def _fail_streams(self, reason: str) -> None:
        for ticket, stream in list(self._streams.items()):
            stream.push(EngineUnavailableError(reason))
            self._forget(ticket)

    def _forget(self, ticket: int) -> None:
        stream = self._streams.pop(ticket)
        if self._tickets.get(stream.request_id) == ticket:
            del self._tickets[stream.request_id]

    # The engine's thread

    def _main(self, started: asyncio.Future[None]) -> None:
        """Load, then step until stopped. Nothing that happens here leaves a reader waiting."""
        try:
            loaded = self._load(self._folder, self._settings)
        except BaseException as error:
            self._failure = f"the engine could not start: {error}"
            failure = error if isinstance(error, GeaError) else EngineUnavailableError(self._failure)
            self._call(partial(_settle, started, failure))
            return
        self._loaded = loaded
        self._call(partial(_settle, started, None))
        try:
            self._run(loaded.core)
        except BaseException as error:
            _log.error("engine_died", error=repr(error), exc_info=True)
            self._failure = f"the engine died: {error!r}"
        self._call(partial(self._fail_streams, self._failure or STOPPED))

    def _run(self, core: EngineCore) -> None:
        while self._wait(core):
            for command in self._take():
                self._apply(core, command)
            started_s = time.perf_counter()
            has_run = core.step()
            self._note(core, (time.perf_counter() - started_s) * 1e3 if has_run else None)
            self._hand_over()

    def _wait(self, core: EngineCore) -> bool:
        """Wait for work. False: the engine is to stop."""
        with self._wake:
            self._wake.wait_for(lambda: self._is_stopping or self._inbox or not core.is_idle)
            return not self._is_stopping

    def _take(self) -> list[_Add | _Abort]:
        with self._wake:
            commands = list(self._inbox)
            self._inbox.clear()
            return commands

    def _apply(self, core: EngineCore, command: _Add | _Abort) -> None:
        if isinstance(command, _Add):
            added = core.add(command.request, partial(self._emit, command.ticket))
            if added is not None:
                self._active[command.ticket] = added
        elif command.ticket in self._active:
            core.abort(self._active[command.ticket])

    def _emit(self, ticket: int, event: EngineEvent | Exception) -> None:
        self._outbox.append((ticket, event))
        if isinstance(event, Finished | Exception):
            self._active.pop(ticket, None)

    def _note(self, core: EngineCore, step_ms: float | None) -> None:
        """Keep what `statistics` returns. Without a step (all was aborted or over already) its time stays as it was."""
        before, scheduler = self._statistics, core.scheduler
        smooth = before.step_ms
        if step_ms is not None:
            smooth = step_ms if not before.num_steps else before.step_ms + SMOOTHING * (step_ms - before.step_ms)
        self._statistics = EngineStatistics(
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            tokens_in_flight=scheduler.tokens_in_flight,
            step_ms=smooth,
            last_step_ms=now_ms(),
            num_steps=before.num_steps + (step_ms is not None),
            num_finished=core.num_finished,
        )

    def _hand_over(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._call(partial(self._deliver, batch))

    def _call(self, callback: Callable[[], None]) -> None:
        """Run something on the event loop. A loop that is closed has no readers left: the engine stops."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            with self._wake:
                self._is_stopping = True


def _settle(started: asyncio.Future[None], failure: BaseException | None) -> None:
    if started.done():
        return
    if failure is None:
        started.set_result(None)
    else:
        started.set_exception(failure)
