"""Runs the entrants of one cell in turns: same prompts, one process each, all loaded and warm before the first run.

A cell is a workload, a profile and a number of requests at once. Only one process works at a time; the order turns with
each repeat. Whoever has spent its limit of time runs no further repeats.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from ops.bench.engine.figures import RunFigures, figures_of, summed_up
from ops.bench.engine.options import EngineName, Profile, Workload
from ops.bench.engine.process import EntrantProcess, running, starter
from ops.bench.engine.prompts import PromptMaker, num_prompt_tokens
from ops.errors import CommandError

WARM_TOKENS = 4
REST_S = 0.3  # until the threads of the one before have gone to sleep
PREFILL_LIMITS = 3  # a prompt phase may take so many limits; it cannot be broken off
MB = 1e6
BUSY_KINDS = ("user", "nice", "system", "irq", "softirq", "steal")  # which of them there are differs by system


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What everybody does at once. `is_serial` lets our engine take one request at a time."""

    workload: Workload
    profile: Profile
    concurrency: int
    is_serial: bool = False

    @property
    def title(self) -> str:
        """Return what it is called while it runs."""
        at_once = f"{self.concurrency} one by one" if self.is_serial else f"{self.concurrency} at once"
        return f"{self.workload}, {self.profile.name}, {at_once}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """Where things are and how long all may take. `folder` names no end of sequence."""

    folder: Path
    ggufs: dict[str, Path]
    prompts: PromptMaker
    peers_python: Path | None
    threads: int
    repeats: int
    limit_s: float
    say: Callable[[str], None]


@dataclass(slots=True, kw_only=True)
class _Entry:
    engine: EngineName
    precision: str
    process: EntrantProcess
    loaded: dict[str, Any] = field(default_factory=dict)
    runs: list[RunFigures] = field(default_factory=list)
    last: dict[str, Any] = field(default_factory=dict)
    before: dict[str, Any] = field(default_factory=dict)
    elsewhere: list[float] = field(default_factory=list)
    texts: list[list[list[int]]] = field(default_factory=list)
    refusal: str = ""
    spent_s: float = 0.0


async def run_cell(contest: Contest, cell: Cell, who: Sequence[tuple[EngineName, str]]) -> list[dict[str, Any]]:
    """Return one result for each entrant, with `skipped` in it where it did not run. Raises CommandError."""
    async with AsyncExitStack() as stack:
        entries = []
        for engine, precision in who:
            how = starter(engine, contest.peers_python)
            process = await stack.enter_async_context(running(f"{engine} {precision}", how, contest.threads))
            entries.append(_Entry(engine=engine, precision=precision, process=process))
        contest.say(f"{cell.title}: loading {len(entries)}")
        await asyncio.gather(*(_load(contest, cell, entry) for entry in entries))
        for entry in entries:
            await _warm(contest, cell, entry)
        for repeat in range(contest.repeats):
            at = repeat % len(entries)
            for entry in (*entries[at:], *entries[:at]):
                contest.say(f"{cell.title}: {entry.process.name}, {repeat + 1} of {contest.repeats}")
                await _run(contest, cell, entry, repeat)
        _compare_texts(entries)
        return [_result(cell, entry) for entry in entries]


async def _load(contest: Contest, cell: Cell, entry: _Entry) -> None:
    prompts = contest.prompts.make(cell.workload, cell.profile, 0, (contest.repeats + 1) * (cell.concurrency + 1))
    entry.loaded = await entry.process.ask(
        do="load",
        folder=str(contest.folder),
        gguf=str(contest.ggufs.get(entry.precision, "")),
        precision=entry.precision,
        num_sequences=1 if cell.is_serial else cell.concurrency,
        context=max(map(len, prompts)) + cell.profile.max_tokens,
        max_tokens=cell.profile.max_tokens,
        threads=contest.threads,
    )


async def _warm(contest: Contest, cell: Cell, entry: _Entry) -> None:
    """Let a first prompt, then as many as there will be, pass; refuse what would take too long."""
    prompts = contest.prompts.make(cell.workload, cell.profile, 0, cell.concurrency + 1)
    await entry.process.ask(do="run", prompts=prompts[:1], max_tokens=1, limit_s=contest.limit_s)
    one = await entry.process.ask(do="run", prompts=prompts[-1:], max_tokens=1, limit_s=contest.limit_s)
    measured = prompts.pop()
    prefill_s = one["arrivals"][0][0][0] / 1e3 * num_prompt_tokens(prompts) / len(measured)
    if prefill_s > PREFILL_LIMITS * contest.limit_s:
        entry.refusal = f"its prompts alone would take about {prefill_s:.0f} s; a higher --limit lets it run"
        return
    short = [prompt[: 2 * WARM_TOKENS] for prompt in prompts]
    tokens = min(WARM_TOKENS, cell.profile.max_tokens)
    entry.before = await entry.process.ask(do="run", prompts=short, max_tokens=tokens, limit_s=contest.limit_s)


async def _run(contest: Contest, cell: Cell, entry: _Entry, repeat: int) -> None:
    if entry.refusal or entry.spent_s > contest.limit_s:
        return
    first = (repeat + 1) * (cell.concurrency + 1)
    prompts = contest.prompts.make(cell.workload, cell.profile, first, cell.concurrency)
    await asyncio.sleep(REST_S)
    began_s, busy_s = time.perf_counter(), _busy_s()
    answer = await entry.process.ask(
        do="run", prompts=prompts, max_tokens=cell.profile.max_tokens, limit_s=contest.limit_s
    )
    wall_s = time.perf_counter() - began_s
    entry.spent_s += wall_s
    entry.elsewhere.append(max(0.0, _busy_s() - busy_s - answer["cpu_s"]) / wall_s)
    entry.runs.append(figures_of(answer["arrivals"], cell.profile.max_tokens))
    entry.texts.append([[token for _, tokens in each for token in tokens] for each in answer["arrivals"]])
    entry.last = answer


def _busy_s() -> float:
    """Return the CPU time that the whole machine has spent so far, or that its host has kept for others."""
    times = psutil.cpu_times()
    return sum(float(getattr(times, kind, 0.0)) for kind in BUSY_KINDS)


def _compare_texts(entries: Sequence[_Entry]) -> None:
    """Note which share of the answers equals that of plain transformers in fp32, as far as both were read."""
    plain = next((each for each in entries if (each.engine, each.precision) == (EngineName.GENERATE, "fp32")), None)
    for entry in entries if plain else ():
        assert plain is not None
        pairs = [
            (own, other)
            for ours, theirs in zip(entry.texts, plain.texts, strict=False)
            for own, other in zip(ours, theirs, strict=True)
        ]
        if pairs:
            same = sum(all(a == b for a, b in zip(own, other, strict=False)) for own, other in pairs)
            entry.last["share_equal"] = same / len(pairs)


def _result(cell: Cell, entry: _Entry) -> dict[str, Any]:
    head = {
        "engine": str(entry.engine),
        "precision": str(entry.precision),
        "workload": str(cell.workload),
        "profile": cell.profile.name,
        "concurrency": cell.concurrency,
    }
    if entry.refusal:
        return head | {"skipped": entry.refusal}
    if not entry.runs:
        raise CommandError(f"{entry.process.name} has not run")
    return head | summed_up(entry.runs) | _memory(entry) | _rest(entry)


def _memory(entry: _Entry) -> dict[str, Any]:
    """Return the high-water mark of the process and its parts; what is in none of them is `other`.

    `peak_memory_mb` counts from the start, loading included; `serving_peak_mb` from when it was loaded.
    """
    loading, serving = entry.loaded["load_peak_bytes"], entry.last["peak_bytes"]
    peak, imports = max(loading, serving), entry.loaded["imports_bytes"]
    weights, cache = entry.last["weight_bytes"], entry.last["kv_bytes"]
    return {
        "peak_memory_mb": _mb(peak),
        "serving_peak_mb": _mb(serving),
        "peak_model_mb": _mb(peak - imports),
        "serving_model_mb": _mb(serving - imports),
        "memory_parts_mb": {
            "imports": _mb(imports),
            "weights": _mb(weights),
            "kv": _mb(cache),
            "other": _mb(serving - imports - weights - cache),
        },
    }


def _mb(num_bytes: int) -> float:
    return round(num_bytes / MB, 1)


def _rest(entry: _Entry) -> dict[str, Any]:
    rest: dict[str, Any] = {
        "cores_busy_elsewhere": round(max(entry.elsewhere), 2),
        "version": entry.last["version"],
        "how": entry.last["how"],
    }
    if "share_equal" in entry.last:
        rest["share_equal_to_transformers"] = round(entry.last["share_equal"], 3)
    for key in ("num_draft_tokens", "num_accepted_tokens"):
        if key in entry.last:
            rest[key] = entry.last[key] - entry.before.get(key, 0)
    if "prefix_hit_rate" in entry.last:
        rest["prefix_hit_rate"] = round(entry.last["prefix_hit_rate"], 3)
    return rest
