"""The engine's thread: it loads the model, then takes commands and steps, until it is stopped.

Knows the core and commands, no event loop: what happens is told by callbacks, which run in this thread. The invariants:
events go out in order, one hand-over per step; whatever ends the thread is told once; `busy_since_s` stands
still while it hangs.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import structlog

from workers.generation.engine.pace import StepReport
from workers.generation.engine.protocol import EngineEvent, EngineRequest, Finished
from workers.generation.engine.statistics import EngineStatistics

if TYPE_CHECKING:
    from workers.generation.engine.core import EngineCore
    from workers.generation.engine.loader import Loaded
    from workers.generation.engine.sequence import ActiveRequest, Constraint

_log = structlog.get_logger(__name__)
Delivery = tuple[int, EngineEvent | Exception]


@dataclass(frozen=True, slots=True)
class Add:
    """Queue a request under a ticket."""

    ticket: int
    request: EngineRequest
    constraint: Constraint | None = None


@dataclass(frozen=True, slots=True)
class Abort:
    """End the request of a ticket."""

    ticket: int


class StepThread:
    """Runs `load`, then the step loop of what it returns.

    Called in the thread: `on_loaded` with the model, or with why there is none and no thread any more; `on_events` with
    what a step has made; `on_end` with why the thread has ended, empty where it was told to; `on_step` after each step.
    """

    def __init__(
        self,
        load: Callable[[], Loaded],
        *,
        on_loaded: Callable[[Loaded | BaseException], None],
        on_events: Callable[[list[Delivery]], None],
        on_end: Callable[[str], None],
        on_step: Callable[[StepReport], None] | None = None,
    ) -> None:
        self._on_loaded = on_loaded
        self._on_events = on_events
        self._on_end = on_end
        self._on_step = on_step
        self._inbox: deque[Add | Abort] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._active: dict[int, ActiveRequest] = {}  # by ticket
        self._outbox: list[Delivery] = []
        self._thread = threading.Thread(target=self._main, args=(load,), name="gea-engine", daemon=True)
        self.statistics = EngineStatistics()
        """What the engine did up to its last step; a new value each time."""
        self.busy_since_s: float | None = None
        """When the thread began with what it does now, on the monotonic clock; None while it waits for work."""

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def post(self, *commands: Add | Abort) -> None:
        """Have commands done before the next step, in order. Never waits for the model."""
        with self._wake:
            self._inbox.extend(commands)
            self._wake.notify()

    def ask_to_stop(self) -> None:
        """Have the thread end after its step. Idempotent."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify()

    def join(self, timeout_s: float) -> None:
        """Wait for the thread's end, not longer than that."""
        self._thread.join(timeout_s)

    def _main(self, load: Callable[[], Loaded]) -> None:
        """Load, then step until stopped. Nothing that happens here leaves a reader waiting."""
        try:
            loaded = load()
        except BaseException as error:
            self._on_loaded(error)
            return
        self._on_loaded(loaded)
        failure = ""
        try:
            self._run(loaded.core)
        except BaseException as error:
            _log.error("engine_died", error=repr(error), exc_info=True)
            failure = f"the engine died: {error!r}"
        finally:
            self.busy_since_s = None
        self._on_end(failure)
        loaded.close()

    def _run(self, core: EngineCore) -> None:
        while self._wait(core):
            self.busy_since_s = time.monotonic()
            for command in self._take():
                self._apply(core, command)
            started_s = time.perf_counter()
            has_run = core.step()
            self._note(core, time.perf_counter() - started_s if has_run else None)
            self._hand_over()

    def _wait(self, core: EngineCore) -> bool:
        """Wait for work. False: the engine is to stop."""
        with self._wake:
            if core.is_idle and not self._inbox:
                self.busy_since_s = None
            self._wake.wait_for(lambda: self._is_stopping or self._inbox or not core.is_idle)
            return not self._is_stopping

    def _take(self) -> list[Add | Abort]:
        with self._wake:
            commands = list(self._inbox)
            self._inbox.clear()
            return commands

    def _apply(self, core: EngineCore, command: Add | Abort) -> None:
        if isinstance(command, Add):
            added = core.add(command.request, partial(self._emit, command.ticket), command.constraint)
            if added is not None:
                self._active[command.ticket] = added
        elif command.ticket in self._active:
            core.abort(self._active[command.ticket])

    def _emit(self, ticket: int, event: EngineEvent | Exception) -> None:
        self._outbox.append((ticket, event))
        if isinstance(event, Finished | Exception):
            self._active.pop(ticket, None)

    def _note(self, core: EngineCore, seconds: float | None) -> None:
        """Keep what the engine did, and report a step if there was one."""
        found = self.statistics = core.statistics()
        if seconds is not None and self._on_step is not None:
            report = StepReport(seconds=seconds, num_tokens=found.step_tokens, batch_size=found.batch_size)
            self._on_step(report)

    def _hand_over(self) -> None:
        if self._outbox:
            batch, self._outbox = self._outbox, []
            self._on_events(batch)
