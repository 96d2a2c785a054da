"""Walks through the model: everywhere within the bounds, or at random far beyond them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.streams.simulation.model import Bounds, State, start
from tests.streams.simulation.steps import Step, fault_of, steps, unfinished


@dataclass(slots=True)
class Found:
    """What a walk met. `fault` is empty if every promise held, else `path` leads to where it broke."""

    num_states: int = 0
    num_ends: int = 0
    fault: str = ""
    path: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join(
            (f"{self.num_states} states, {self.num_ends} ends: {self.fault or 'all promises held'}", *self.path)
        )


def explore(bounds: Bounds, *, max_states: int = 10_000_000) -> Found:
    """Visit every reachable state, nearest first; stop at the first broken promise."""
    first = start(bounds)
    origins: dict[State, tuple[State | None, str]] = {first: (None, "")}
    ahead = deque((first,))
    found = Found()
    while ahead:
        state = ahead.popleft()
        found.num_states += 1
        assert found.num_states <= max_states, "the bounds are too large"
        following = steps(state, bounds)
        is_over = not any(step.is_due for step in following)
        found.num_ends += is_over
        found.fault = fault_of(state, bounds) or (unfinished(state, bounds) if is_over else "")
        if found.fault:
            found.path = _path(origins, state)
            break
        for step in following:
            if step.after not in origins:
                origins[step.after] = (state, step.name)
                ahead.append(step.after)
    return found


def wander(bounds: Bounds, choose: Callable[[Sequence[Step]], Step], *, max_steps: int = 400) -> Found:
    """Take steps as `choose` says until nothing is due; faults count as steps."""
    state, found = start(bounds), Found()
    for _ in range(max_steps):
        found.num_states += 1
        following = steps(state, bounds)
        is_over = not any(step.is_due for step in following)
        found.fault = fault_of(state, bounds) or (unfinished(state, bounds) if is_over else "")
        if found.fault or is_over:
            found.num_ends = 1
            return found
        step = choose(following)
        found.path.append(step.name)
        state = step.after
    found.fault = "it goes on for ever"
    return found


def _path(origins: dict[State, tuple[State | None, str]], state: State) -> list[str]:
    names: list[str] = []
    while True:
        before, name = origins[state]
        if before is None:
            return names[::-1]
        names.append(name)
        state = before
