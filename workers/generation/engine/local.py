"""The in-process engine: a thread of its own runs the step loop, the event loop only exchanges messages with it.

Knows streams, tickets and who waits; the thread is `step_thread`'s, a step `core`'s. The invariants: no method waits
for the model, nor for the compilation of a constraint; every stream ends, with EngineUnavailableError where the thread
died, or hangs for longer than a step may take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from schemas.errors import EngineUnavailableError, GeaError, InternalError, InvalidRequestError, RejectedError
from streams.racing import end_tasks
from workers.generation.engine.admission import check_request
from workers.generation.engine.loader import Loaded, load
from workers.generation.engine.memory import MemoryParts
from workers.generation.engine.pace import StepReport
from workers.generation.engine.protocol import EngineIdentity, EngineRequest, Finished, Tokenizer
from workers.generation.engine.settings import LocalEngineSettings
from workers.generation.engine.statistics import EngineStatistics
from workers.generation.engine.step_thread import Abort, Add, Delivery, StepThread
from workers.generation.engine.stream import QueuedStream

if TYPE_CHECKING:
    from workers.generation.engine.sequence import Constraint

STOP_TIMEOUT_S = 10.0  # a step takes well below a second; a stuck one must not hold up the process
STUCK_STOP_TIMEOUT_S = 0.2  # for one that is known to hang
LOOKS_PER_LIMIT = 8  # how often a hang is looked for within the time that a step may take
STOPPED = "the engine has stopped"

_log = structlog.get_logger(__name__)


class LocalEngine:
    """Runs one model in this process. `load_model` is called in the engine's thread (tests give their own)."""

    def __init__(
        self,
        folder: Path,
        settings: LocalEngineSettings = LocalEngineSettings(),  # noqa: B008 (frozen)
        *,
        load_model: Callable[[Path, LocalEngineSettings], Loaded] = load,
        on_step: Callable[[StepReport], None] | None = None,
    ) -> None:
        self._settings = settings
        self._thread = StepThread(
            partial(load_model, folder, settings),
            on_loaded=self._on_loaded,
            on_events=lambda batch: self._call(partial(self._deliver, batch)),
            on_end=lambda failure: self._call(partial(self._fail, failure)),
            on_step=on_step,
        )
        self._is_stopping = False
        self._failure = ""
        self._loaded: Loaded | None = None
        self._streams: dict[int, QueuedStream] = {}  # by ticket
        self._tickets: dict[str, int] = {}  # request_id to ticket, of requests that may still be aborted
        self._uncompiled: dict[int, EngineRequest] = {}  # by ticket, while their constraint is compiled
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="gea-constraint")
        self._next_ticket = 0
        self._started: asyncio.Future[None] | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def identity(self) -> EngineIdentity:
        """Return what shapes the text. Known after `start`."""
        return self._ready().identity

    @property
    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer. Known after `start`."""
        return self._ready().tokenizer

    @property
    def memory(self) -> MemoryParts | None:
        """Return where the memory goes, as far as steps have shown; None where the model does not tell."""
        measure = self._ready().memory
        return None if measure is None else measure()

    async def start(self) -> None:
        """Load and warm. Raises ConfigError for a model that cannot run, EngineUnavailableError if loading failed."""
        assert self._started is None, "an engine starts once"
        self._loop = asyncio.get_running_loop()
        self._started = self._loop.create_future()
        self._thread.start()
        await self._started
        if not self._is_stopping:
            self._watching = asyncio.create_task(self._watch())

    def submit(self, request: EngineRequest) -> QueuedStream:
        """Queue a request; errors as `Engine.submit`. Its constraint is compiled first; an unusable one ends it."""
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
            layout=loaded.layout,
        )
        if len(self._streams) >= self._settings.max_sequences + self._settings.max_waiting:
            raise RejectedError(f"the engine's queue of {self._settings.max_waiting} is full", retry_after_s=1.0)
        self._next_ticket += 1
        stream = QueuedStream(request.request_id)
        self._streams[self._next_ticket] = stream
        self._tickets[request.request_id] = self._next_ticket
        if request.sampling.constraint is None:
            self._thread.post(Add(self._next_ticket, request))
        else:
            self._compile(loaded, self._next_ticket, request)
        return stream

    def abort(self, request_id: str) -> None:
        """Stop a request within one step. Unknown ids are ignored; the id may be used again at once."""
        ticket = self._tickets.pop(request_id, None)
        if ticket is None:
            return
        if (request := self._uncompiled.pop(ticket, None)) is not None:  # nothing will be drawn: it needs no form
            free = replace(request, sampling=replace(request.sampling, constraint=None))
            self._thread.post(Add(ticket, free))
        self._thread.post(Abort(ticket))

    def statistics(self) -> EngineStatistics:
        """Return what the engine does now. Safe from any thread."""
        found = self._thread.statistics
        waiting = max(0, len(self._streams) - found.running)  # what was posted a moment ago waits too
        tokens_per_s = found.tokens_per_s if found.running else 0.0
        return replace(found, waiting=waiting, tokens_per_s=tokens_per_s, failure=self._failure)

    async def stop(self) -> None:
        """End what runs with EngineUnavailableError and free everything. Idempotent, and bounded in time."""
        self._is_stopping = True
        await end_tasks(self._watching)
        self._thread.ask_to_stop()
        if self._started is not None:
            await asyncio.to_thread(self._thread.join, STUCK_STOP_TIMEOUT_S if self._failure else STOP_TIMEOUT_S)
        self._compiling.shutdown(wait=False, cancel_futures=True)
        self._fail_streams(STOPPED)
        self._loaded = None  # weights and cache with it

    def _ready(self) -> Loaded:
        if self._loaded is None:
            state = STOPPED if self._is_stopping else "the engine has not started"
            raise EngineUnavailableError(self._failure or state)
        return self._loaded

    async def _watch(self) -> None:
        """Give up an engine that makes no step although it has work: its requests go to the next owner."""
        limit_s = self._settings.step_limit_s
        seen, num_looks = self._thread.busy_since_s, 0
        while num_looks < LOOKS_PER_LIMIT:  # looks, not a clock: the whole process may have been stopped for a while
            await asyncio.sleep(limit_s / LOOKS_PER_LIMIT)
            since = self._thread.busy_since_s
            num_looks = num_looks + 1 if since is not None and since == seen else 0
            seen = since
        _log.error("engine_stuck", num_requests=len(self._streams))
        self._thread.ask_to_stop()  # should it come back
        self._fail(f"the engine has made no step for {limit_s:g} s")

    def _compile(self, loaded: Loaded, ticket: int, request: EngineRequest) -> None:
        spec = request.sampling.constraint
        assert spec is not None
        self._uncompiled[ticket] = request
        compiling = self._loop.run_in_executor(self._compiling, loaded.compile_constraint, spec)
        compiling.add_done_callback(partial(self._compiled, ticket))

    def _compiled(self, ticket: int, compiling: asyncio.Future[Constraint]) -> None:
        """Hand a request on that has its constraint; it may have been aborted meanwhile, or the engine stopped."""
        error = None if compiling.cancelled() else compiling.exception()
        request = self._uncompiled.pop(ticket, None)
        if request is None or compiling.cancelled():
            return
        if error is None:
            self._thread.post(Add(ticket, request, compiling.result()))
        else:
            failure = error if isinstance(error, GeaError) else InternalError(f"response_format: {error!r}")
            self._deliver([(ticket, failure)])

    def _deliver(self, batch: list[Delivery]) -> None:
        for ticket, event in batch:
            stream = self._streams.get(ticket)
            if stream is None:
                continue
            stream.push(event)
            if isinstance(event, Finished | Exception):
                self._forget(ticket)

    def _fail(self, failure: str) -> None:
        self._failure = self._failure or failure
        self._fail_streams(self._failure or STOPPED)

    def _fail_streams(self, reason: str) -> None:
        self._uncompiled.clear()
        for ticket, stream in list(self._streams.items()):
            stream.push(EngineUnavailableError(reason))
            self._forget(ticket)

    def _forget(self, ticket: int) -> None:
        stream = self._streams.pop(ticket)
        if self._tickets.get(stream.request_id) == ticket:
            del self._tickets[stream.request_id]

    def _on_loaded(self, result: Loaded | BaseException) -> None:
        """Take the model, or why there is none. Runs in the engine's thread."""
        assert self._started is not None, "`start` has begun the thread"
        if not isinstance(result, BaseException):
            self._loaded = result
            self._call(partial(_settle, self._started, None))
            return
        self._failure = f"the engine could not start: {result}"
        failure = result if isinstance(result, GeaError) else EngineUnavailableError(self._failure)
        self._call(partial(_settle, self._started, failure))

    def _call(self, callback: Callable[[], None]) -> None:
        """Run something on the event loop. A loop that is closed has no readers left: the engine stops."""
        try:
            self._loop.call_soon_threadsafe(callback)
        except RuntimeError:
            self._thread.ask_to_stop()


def _settle(started: asyncio.Future[None], failure: BaseException | None) -> None:
    if started.done():
        return
    if failure is None:
        started.set_result(None)
    else:
        started.set_exception(failure)
