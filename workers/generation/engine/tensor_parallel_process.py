"""The process of one rank, as the first rank sees it: start it, ask it, notice its death, end it.

Knows commands and replies, no model. The invariant: nothing here waits without a bound, and a process that was started
is ended by `close`, or with this process.
"""

from __future__ import annotations

import atexit
import multiprocessing
import time
from multiprocessing import connection
from pathlib import Path

from schemas.errors import ConfigError, EngineUnavailableError
from workers.generation.engine.tensor_parallel_rank import Command, RankPlan, Reply, ReplyKind, serve_rank

CLOSE_S = 5.0  # a rank that does not end by itself in this time is killed


class RankProcess:
    """One rank beside the first."""

    def __init__(self, plan: RankPlan, meeting: Path, rank: int) -> None:
        """Start the process. It replies once when it has imported its modules, and once when it is loaded."""
        context = multiprocessing.get_context("spawn")  # a fork would copy locks that torch's threads hold
        self._pipe, theirs = context.Pipe()
        self._name = f"rank {rank} of {plan.size}"
        self._process = context.Process(
            target=serve_rank, args=(theirs, plan, meeting, rank), name=f"gea-rank-{rank}", daemon=True
        )
        self._process.start()
        atexit.register(self.kill)  # before multiprocessing waits for the end of a process that heeds no SIGTERM
        theirs.close()  # so that the pipe ends with the process

    @property
    def pid(self) -> int | None:
        """Return the process's number."""
        return self._process.pid

    def send(self, command: Command) -> None:
        """Give a command. Raises EngineUnavailableError where the process is gone."""
        try:
            self._pipe.send(command)
        except OSError as error:
            raise self._gone() from error

    def receive(self, timeout_s: float) -> Reply:
        """Return the next reply.

        Raises ConfigError where the rank says so, EngineUnavailableError where it is gone or silent for too long.
        """
        deadline = time.monotonic() + timeout_s
        while not self._pipe.poll():
            left = deadline - time.monotonic()
            if left <= 0:
                raise EngineUnavailableError(f"{self._name} has not answered within {timeout_s:g} s")
            if self._process.sentinel in connection.wait([self._pipe, self._process.sentinel], left):
                break
        try:
            reply: Reply = self._pipe.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if reply.kind is ReplyKind.CONFIG:
            raise ConfigError(reply.text)
        return reply

    def ask_to_end(self) -> None:
        """Have the process end after what it does now. Idempotent."""
        self._pipe.close()

    def join(self) -> None:
        """Wait a little for its end, then end it. Idempotent."""
        self._process.join(CLOSE_S)
        self.kill()

    def kill(self) -> None:
        """End the process now. Idempotent."""
        atexit.unregister(self.kill)
        self._process.kill()
        self._process.join(CLOSE_S)

    def _gone(self) -> EngineUnavailableError:
        self._process.join(CLOSE_S)
        return EngineUnavailableError(f"{self._name} has ended with exit code {self._process.exitcode}")
