"""The whole bench: rounds of some kills each until all are done, a checkpoint after each, then the report."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ops.bench.chaos.checkpoint import load_rounds, save_rounds
from ops.bench.chaos.faults import FaultGroup
from ops.bench.chaos.production import production_gaps
from ops.bench.chaos.result import RoundResult, merged, report
from ops.bench.chaos.round import RoundPlan, Say, run_round
from ops.bench.chaos.stack import PRODUCTION, Size
from ops.percentile import percentile
from workers.settings import EngineKind

KILLS_PER_ROUND = {EngineKind.FAKE: 50, EngineKind.LOCAL: 25}
READERS = {EngineKind.FAKE: 14, EngineKind.LOCAL: 4}
MAX_TOKENS_BETWEEN = {EngineKind.FAKE: 250, EngineKind.LOCAL: 50}  # between two faults, at their pace some seconds
MAX_TOKENS = {EngineKind.FAKE: 160, EngineKind.LOCAL: 48}  # bytes of the scripted text; the model's tokens take longer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """What the command was asked for."""

    num_kills: int
    seed: int
    size: Size
    groups: frozenset[FaultGroup]
    has_production_gap: bool = True
    checkpoint: Path | None = None

    @property
    def conditions(self) -> dict[str, Any]:
        """Return what two runs must have in common to be compared, or to be one run."""
        sessions = self.size.sessions
        return {
            "seed": self.seed,
            "engine": "model" if self.size.engine is EngineKind.LOCAL else "fake",
            "workers": self.size.num_generation,
            "routers": self.size.num_routers,
            "partitions": self.size.num_partitions,
            "readers": READERS[self.size.engine],
            "max_tokens": MAX_TOKENS[self.size.engine],
            "pace_ms": self.size.pace_ms if self.size.engine is EngineKind.FAKE else None,
            "session_ms": sessions.session_ms,
            "heartbeat_ms": sessions.heartbeat_ms,
            "fault_groups": sorted(group.value for group in self.groups),
        }


async def run_chaos(options: ChaosOptions, say: Say, on_round: Callable[[RoundResult], None]) -> dict[str, Any]:
    """Run what is left of the bench and return its report. Raises CommandError, EmbeddedError, RuntimeError."""
    path = options.checkpoint
    rounds = load_rounds(path, options.conditions) if path else []
    while (left := options.num_kills - sum(each.kills for each in rounds)) > 0:
        result = await _one_round(options, len(rounds), min(left, KILLS_PER_ROUND[options.size.engine]), say)
        rounds.append(result)
        if path:
            save_rounds(path, options.conditions, rounds)
        on_round(result)
    found = report(merged(rounds), options.conditions | _machine(len(rounds)))
    if options.has_production_gap:
        gaps = await _in_folder(lambda folder: production_gaps(options.size, folder, say))
        found["production_gap_ms"] = {
            "p50": percentile(gaps, 0.5),
            "longest": max(gaps),
            "deaths": len(gaps),
            "session_ms": PRODUCTION.session_ms,
            "heartbeat_ms": PRODUCTION.heartbeat_ms,
        }
    return found


async def _one_round(options: ChaosOptions, number: int, num_kills: int, say: Say) -> RoundResult:
    """Run a round; its logs are kept where they are evidence, and named."""
    wanted = RoundPlan(
        seed=options.seed,
        number=number,
        num_kills=num_kills,
        groups=options.groups,
        size=options.size,
        num_readers=READERS[options.size.engine],
        max_tokens=MAX_TOKENS[options.size.engine],
        max_tokens_between=MAX_TOKENS_BETWEEN[options.size.engine],
    )
    folder = Path(tempfile.mkdtemp(prefix="gea-chaos-"))
    is_evidence = True
    try:
        result = await run_round(wanted, folder, say)
        is_evidence = not result.is_clean or bool(result.loose_ends)
        if is_evidence:
            result.problems.append(f"logs of round {number}: {folder}")
        return result
    finally:
        if not is_evidence:
            shutil.rmtree(folder, ignore_errors=True)


async def _in_folder(work: Callable[[Path], Any]) -> Any:
    folder = Path(tempfile.mkdtemp(prefix="gea-chaos-"))
    try:
        return await work(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _machine(num_rounds: int) -> dict[str, Any]:
    return {
        "rounds": num_rounds,
        "cores": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
    }
