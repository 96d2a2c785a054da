"""An entrant that counts instead of thinking, run as a process by the tests of processes and cells."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from ops.bench.engine.entrant import Arrivals, Turn, serve


class Scripted:
    """Answers a prompt with the numbers after its last token; a prompt of one 13 ends the process."""

    def __init__(self, command: dict[str, Any]) -> None:
        if command["precision"] == "broken":
            raise ValueError("no such precision")
        sys.stdout.write("what a library says\n")
        sys.stdout.flush()

    def facts(self) -> dict[str, Any]:
        """Return what a real one tells, made up."""
        return {"weight_bytes": 3_000_000, "kv_bytes": 1_000_000, "version": "scripted", "how": "by counting"}

    def run(self, prompts: list[list[int]], max_tokens: int, turn: Turn) -> Arrivals:
        """Count."""
        if prompts == [[13]]:
            os._exit(3)
        turn.begin()
        arrivals: Arrivals = [[] for _ in prompts]
        for step in range(max_tokens):
            if turn.is_over(step):
                break
            for prompt, each in zip(prompts, arrivals, strict=True):
                each.append((time.perf_counter(), [prompt[-1] + step + 1]))
        return arrivals


if __name__ == "__main__":
    serve(Scripted)
