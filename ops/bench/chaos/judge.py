"""Puts the checker's questions to everything that a round has left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ops.bench.chaos.checker import (
    Audit,
    Entry,
    Memory,
    Problem,
    Received,
    check_commits,
    check_memory,
    check_request,
    end_place,
    read,
)
from ops.bench.chaos.gaps import Death
from ops.bench.chaos.load import Asked
from ops.bench.chaos.reference import Reference

SAY_EVERY = 50
AT_ONCE = 8  # as many as a model decodes at little more than the cost of one


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A round from outside: what was asked and seen, the log, the groups, the deaths."""

    asked: Sequence[Asked]
    tokens: Mapping[str, Sequence[Entry]]
    received: Sequence[Received]
    audits: Sequence[Audit]
    deaths: Sequence[Death] = field(default_factory=list)

    def entries(self, request_id: str) -> Sequence[Entry]:
        """Return the records of a request."""
        return self.tokens.get(request_id, ())


async def judge(
    observed: Observed, reference: Reference, say: Callable[[str], None] = lambda text: None
) -> list[Problem]:
    """Return every broken promise."""
    ends = {request_id: place for request_id, each in observed.tokens.items() if (place := end_place(each))}
    problems = [found for audit in observed.audits for found in check_commits(observed.received, audit, ends)]
    slots, num_compared = asyncio.Semaphore(AT_ONCE), 0

    async def compare(asked: Asked, turns: Memory) -> list[Problem]:
        nonlocal num_compared
        async with slots:
            found = await _judge_one(observed, asked, reference, turns)
        num_compared += 1
        if num_compared % SAY_EVERY == 0:
            say(f"compared {num_compared} of {len(observed.asked)} requests with undisturbed runs")
        return found

    for found in await asyncio.gather(*(compare(asked, turns) for asked, turns in _with_turns(observed))):
        problems += found
    return problems


def _with_turns(observed: Observed) -> list[tuple[Asked, Memory]]:
    """Return each request with the turns of its session before it."""
    earlier: dict[str, Memory] = {}
    found = []
    for asked in observed.asked:
        session = asked.planned.request.session_id or ""
        found.append((asked, earlier.get(session, ())))
        if session:
            earlier[session] = (*earlier.get(session, ()), _turn(observed, asked))
    return found


async def _judge_one(observed: Observed, asked: Asked, reference: Reference, turns: Memory) -> list[Problem]:
    """Judge one request; what it remembers may be less than its session had, since Redis may have lost it."""
    request_id = asked.planned.request_id
    entries = observed.entries(request_id)
    view, _ = read(entries)
    memory = view.origin.memory if view.origin is not None else ()
    expected = await reference.answer(asked.planned, memory)
    return check_memory(request_id, memory, turns) + check_request(request_id, entries, expected, asked.seen)


def _turn(observed: Observed, asked: Asked) -> tuple[str, str]:
    view, _ = read(observed.entries(asked.planned.request_id))
    return asked.planned.request.last_user_text(), view.text()
