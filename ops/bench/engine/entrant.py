"""One engine of the comparison as a process: commands come as lines of JSON, answers leave as lines of JSON.

Needs the standard library only, because the peers' Python runs it too. Knows no engine. The invariant: the process
answers every command with one line, an `error` in it if it could not, and nothing else reaches its stdout.

Commands are `{"do": "load", …}` and `{"do": "run", "prompts": [[…]], "max_tokens": n, "limit_s": s}`; the end of stdin
ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

STATUS = Path("/proc/self/status")
CLEAR_REFS = Path("/proc/self/clear_refs")
RESET_PEAK = "5"  # see proc_pid_clear_refs(5)
UNIT = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
MIN_TOKENS = 5
Arrivals = list[list[tuple[float, list[int]]]]


class Turn:
    """The time of one run: `begin` is called right before the requests are handed over."""

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self.began_s = time.perf_counter()

    def begin(self) -> None:
        """Start the clock."""
        self.began_s = time.perf_counter()

    def is_over(self, fewest_tokens: int) -> bool:
        """Say whether to break off: time is up, and each request has tokens enough to tell the pace of decoding."""
        return fewest_tokens >= MIN_TOKENS and time.perf_counter() - self.began_s > self._limit_s


class Entrant(Protocol):
    """An engine that is loaded, ready to run."""

    def run(self, prompts: list[list[int]], max_tokens: int, turn: Turn) -> Arrivals:
        """Run all prompts at once, greedily, `max_tokens` tokens each, whatever end of sequence is among them.

        Return for each prompt what came: pairs of a `time.perf_counter()` and the token ids that came then.
        """
        ...

    def facts(self) -> dict[str, Any]:
        """Return what is known of it: `weight_bytes`, `kv_bytes`, versions, how it is set."""
        ...


def serve(load: Callable[[dict[str, Any]], Entrant]) -> None:
    """Answer commands until stdin ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    entrant: Entrant | None = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            if command["do"] == "load":
                imports_bytes = peak_bytes()
                entrant = load(command)
                answer = {"imports_bytes": imports_bytes, "load_peak_bytes": peak_bytes(), **entrant.facts()}
                forget_peak()
            else:
                assert entrant is not None, "load comes first"
                answer = _run(entrant, command["prompts"], command["max_tokens"], Turn(command["limit_s"]))
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _run(entrant: Entrant, prompts: list[list[int]], max_tokens: int, turn: Turn) -> dict[str, Any]:
    """Run once; times in the answer are milliseconds from the moment the requests were handed over."""
    cpu_before_s = time.process_time()
    arrivals = entrant.run(prompts, max_tokens, turn)
    cpu_s = time.process_time() - cpu_before_s
    return {
        "arrivals": [[[(at - turn.began_s) * 1e3, token_ids] for at, token_ids in each] for each in arrivals],
        "cpu_s": cpu_s,
        "peak_bytes": peak_bytes(),
        **entrant.facts(),
    }


def peak_bytes() -> int:
    """Return the most memory that this process has had resident so far: its high-water mark."""
    if STATUS.exists():
        for line in STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * UNIT


def forget_peak() -> None:
    """Let the high-water mark begin anew from what is resident now, where the system can (Linux)."""
    with contextlib.suppress(OSError):
        CLEAR_REFS.write_text(RESET_PEAK)
