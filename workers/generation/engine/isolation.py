"""Runs what is scheduled so that whatever fails costs only the sequence that fails alone.

Knows how to make a step smaller, no requests. The invariant: every token that was scheduled is in one of the parts,
in its order, and stands in a part with an error only if it fails by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from schemas.errors import EngineUnavailableError
from workers.generation.engine.batch import StepBatch
from workers.generation.engine.plan import Scheduled, step_batch

Forward = Callable[[StepBatch], torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What ran together: logits `(rows that draw, vocab)`, or why it could not run."""

    items: Sequence[Scheduled]
    result: torch.Tensor | Exception

    @property
    def is_out_of_memory(self) -> bool:
        """Say whether it was too large."""
        return isinstance(self.result, torch.OutOfMemoryError | MemoryError)


def run_isolated(forward: Forward, items: Sequence[Scheduled]) -> tuple[list[Part], int]:
    """Run all at once; what fails is run again in halves. Returns the parts, and the rows of the smallest that was out
    of memory, 0 if none was."""
    part = Part(items, _result(forward, items))
    if isinstance(part.result, torch.Tensor):
        return [part], 0
    num_rows = sum(item.num_rows for item in items) if part.is_out_of_memory else 0
    smaller = _smaller(part)
    if not smaller:
        return [part], num_rows
    parts: list[Part] = []
    for half in smaller:
        ran, too_many = run_isolated(forward, half)
        parts += ran
        num_rows = min(filter(None, (num_rows, too_many)), default=0)
    return parts, num_rows


def _result(forward: Forward, items: Sequence[Scheduled]) -> torch.Tensor | Exception:
    try:
        return forward(step_batch(items))
    except EngineUnavailableError:
        raise  # what runs the model is gone for good: that is the end of the engine, not of a request
    except Exception as error:
        return error.with_traceback(None)  # its frames would hold the tensors of the step


def _smaller(part: Part) -> list[list[Scheduled]]:
    """Return the halves of what failed; nothing if it cannot be made smaller."""
    items = list(part.items)
    if len(items) > 1:
        middle = len(items) // 2
        return [items[:middle], items[middle:]]
    (item,) = items
    if item.draft:
        return [[replace(item, draft=[])]]
    middle = (item.start + item.end) // 2
    if not part.is_out_of_memory or middle == item.start:
        return []
    return [[replace(item, end=middle, is_drawing=False)], [replace(item, start=middle)]]
