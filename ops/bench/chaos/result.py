"""The numbers of a round, as plain values that a checkpoint keeps, and the report that sums rounds up."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ops.bench.chaos.checker import Fault, Problem, Seen, is_answered_again
from ops.bench.chaos.driver import Driver
from ops.bench.chaos.gaps import TakeOver, longest_gap_ms, take_overs
from ops.bench.chaos.judge import Observed
from ops.bench.chaos.silence import Leaks
from ops.percentile import percentile

MAX_PROBLEMS = 40  # shown; all are counted
HARMS = ("lost", "duplicated", "altered", "leaked_blocks", "leaked_tasks", "uncommitted")
NUM_SLOWEST = 3  # of each round


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """What a round found. Requests are counted once per kind of harm; times are milliseconds."""

    kills: int = 0
    kills_at_work: int = 0
    requests: int = 0
    lost: int = 0
    duplicated: int = 0
    altered: int = 0
    leaked_blocks: int = 0
    leaked_tasks: int = 0
    uncommitted: int = 0
    resets: int = 0
    answered_again: int = 0
    take_overs: int = 0
    recovery_ms: list[int] = field(default_factory=list)
    recovery_undisturbed_ms: list[int] = field(default_factory=list)
    gap_ms: list[int] = field(default_factory=list)
    longest_gap_ms: int = 0
    slowest: list[str] = field(default_factory=list)
    tokens: int = 0
    audits: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    requests_by_kind: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    loose_ends: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def is_clean(self) -> bool:
        """Return whether every promise was kept."""
        return not any(getattr(self, name) for name in HARMS)

    @classmethod
    def of(
        cls,
        observed: Observed,
        problems: Sequence[Problem],
        driver: Driver,
        leaks: Leaks,
        loose_ends: Sequence[str],
        *,
        seconds: float,
    ) -> RoundResult:
        """Sum a round up."""
        overs = [
            over
            for asked in observed.asked
            for over in take_overs(observed.entries(asked.planned.request_id), asked.seen, observed.deaths)
        ]
        seen = [asked.seen for asked in observed.asked]
        return cls(
            kills=driver.num_kills,
            kills_at_work=driver.num_kills_at_work,
            requests=len(observed.asked),
            lost=_harmed(problems, Fault.LOST),
            duplicated=_harmed(problems, Fault.DUPLICATED),
            altered=_harmed(problems, Fault.ALTERED),
            leaked_blocks=leaks.tokens + leaks.queued,
            leaked_tasks=leaks.tasks.total(),
            uncommitted=leaks.uncommitted,
            answered_again=sum(map(is_answered_again, observed.tokens.values())),
            resets=sum(each.num_resets for each in seen),
            take_overs=len(overs),
            recovery_ms=_recoveries(overs),
            recovery_undisturbed_ms=_recoveries([over for over in overs if not over.is_within(driver.disturbed)]),
            gap_ms=[over.gap_ms for over in overs],
            longest_gap_ms=max(map(longest_gap_ms, seen), default=0),
            slowest=[f"{each.request_id}: {longest_gap_ms(each)} ms" for each in _slowest(seen)],
            tokens=sum(len(ids) for each in seen for ids in each.token_ids.values()),
            audits=len(observed.audits),
            faults=dict(driver.counts),
            requests_by_kind=dict(Counter(asked.planned.kind.value for asked in observed.asked)),
            problems=[f"{each.fault}: {each.request_id}: {each.what}" for each in problems[:MAX_PROBLEMS]],
            loose_ends=[*loose_ends, *(f"task left: {name} × {count}" for name, count in leaks.tasks.items())],
            seconds=round(seconds, 1),
        )


def merged(rounds: Iterable[RoundResult]) -> RoundResult:
    """Return the sum of rounds."""
    total: dict[str, Any] = dataclasses.asdict(RoundResult())
    for each in rounds:
        for name, value in dataclasses.asdict(each).items():
            if isinstance(value, dict):
                total[name] = dict(Counter(total[name]) + Counter(value))
            elif name == "longest_gap_ms":
                total[name] = max(total[name], value)
            else:
                total[name] += value
    return RoundResult(**total)


def report(total: RoundResult, conditions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON object of the command."""
    return {
        "kills": total.kills,
        "requests": total.requests,
        "lost": total.lost,
        "duplicated": total.duplicated,
        "altered": total.altered,
        "leaked_blocks": total.leaked_blocks,
        "recovery_ms": {"p50": percentile(total.recovery_ms, 0.5), "p99": percentile(total.recovery_ms, 0.99)},
        "recovery_undisturbed_ms": {
            "p50": percentile(total.recovery_undisturbed_ms, 0.5),
            "p99": percentile(total.recovery_undisturbed_ms, 0.99),
            "count": len(total.recovery_undisturbed_ms),
        },
        "leaked_tasks": total.leaked_tasks,
        "uncommitted": total.uncommitted,
        "resets": total.resets,
        "answered_again": total.answered_again,
        "take_overs": total.take_overs,
        "gap_ms": {
            "p50": percentile(total.gap_ms, 0.5),
            "p99": percentile(total.gap_ms, 0.99),
            "longest": total.longest_gap_ms,
        },
        "kills_at_work": total.kills_at_work,
        "tokens": total.tokens,
        "audits": total.audits,
        "faults": dict(sorted(total.faults.items())),
        "requests_by_kind": dict(sorted(total.requests_by_kind.items())),
        "slowest": total.slowest[:MAX_PROBLEMS],
        "problems": total.problems[:MAX_PROBLEMS],
        "loose_ends": total.loose_ends[:MAX_PROBLEMS],
        "seconds": round(total.seconds, 1),
        "conditions": dict(conditions),
    }


def _slowest(seen: Sequence[Seen]) -> list[Seen]:
    return sorted(seen, key=longest_gap_ms, reverse=True)[:NUM_SLOWEST]


def _harmed(problems: Sequence[Problem], fault: Fault) -> int:
    return len({each.request_id for each in problems if each.fault is fault})


def _recoveries(overs: Sequence[TakeOver]) -> list[int]:
    return [over.recovery_ms for over in overs if over.recovery_ms is not None]
