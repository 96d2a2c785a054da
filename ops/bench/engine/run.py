"""The whole engine bench: models, cells one after another, and what their results say. Knows no engine's inside."""

from __future__ import annotations

import hashlib
import os
import platform
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ops.bench.engine.models import gguf_files, language_gguf, without_end
from ops.bench.engine.options import PREFILL, EngineName, EngineOptions, Workload, entrants_of, num_cores
from ops.bench.engine.prompts import PromptMaker
from ops.bench.engine.race import Cell, Contest, run_cell
from ops.bench.engine.summary import claims, ratios, targets
from workers.generation.engine.tokenizer import BytePairTokenizer

ONE_BY_ONE = 8  # requests of the reference's claim about batches
DISTURBED_CORES = 0.2  # busy with something else during a run: from there on its figures are not to be trusted
CPU_INFO = Path("/proc/cpuinfo")


async def run_engine(options: EngineOptions, model: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """Run all cells and return conditions, results and what they say. Raises CommandError."""
    began_s, load_before = time.monotonic(), os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="gea-engine-") as temporary:
        contest = _contest(options, model, Path(temporary), say)
        results = [result for cell in cells(options) for result in await run_cell(contest, cell, entrants_of(options))]
        prefill, one_by_one = await _extras(contest, options) if options.has_extras else ([], [])
    measured = {"seconds": round(time.monotonic() - began_s), "load_before": round(load_before, 1)}
    return {
        "conditions": conditions(options, model, [*results, *prefill, *one_by_one]) | measured,
        "results": results,
        "prefill": prefill,
        "one_by_one": one_by_one,
        "ratios": ratios(results),
        "claims": claims(results, one_by_one),
        "targets": targets(results, prefill),
    }


def cells(options: EngineOptions) -> list[Cell]:
    """Return every cell, the short ones first."""
    return [
        Cell(workload=workload, profile=profile, concurrency=concurrency)
        for profile in options.profiles
        for workload in options.workloads
        for concurrency in options.concurrency
    ]


async def _extras(contest: Contest, options: EngineOptions) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Measure prompts of 512 tokens alone, and our engine with one request after another."""
    alone = Cell(workload=Workload.PLAIN, profile=PREFILL, concurrency=1)
    prefill = await run_cell(contest, alone, entrants_of(options))
    serial = Cell(
        workload=options.workloads[0], profile=options.profiles[0], concurrency=_serial(options), is_serial=True
    )
    ours = [each for each in entrants_of(options) if each[0] is EngineName.GEA]
    return prefill, await run_cell(contest, serial, ours) if ours else []


def _serial(options: EngineOptions) -> int:
    """Return how many requests go one by one: as many as some cell has at once, so that the two compare."""
    return ONE_BY_ONE if ONE_BY_ONE in options.concurrency else max(options.concurrency)


def _contest(options: EngineOptions, model: Path, folder: Path, say: Callable[[str], None]) -> Contest:
    ggufs: dict[str, Path] = {}
    if EngineName.LLAMA_CPP in options.engines and options.peers_python is not None:
        source = language_gguf()
        ggufs = gguf_files(source, options.llama_precisions, folder, options.peers_python, options.threads)
    return Contest(
        folder=without_end(model, folder / model.name),
        ggufs=ggufs,
        prompts=PromptMaker.load(BytePairTokenizer.load(model), model),
        peers_python=options.peers_python,
        threads=options.threads,
        repeats=options.repeats,
        limit_s=options.limit_s,
        say=say,
    )


def conditions(options: EngineOptions, model: Path, results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return under what all this was measured."""
    ran = [each for each in results if "skipped" not in each]
    return {
        "model": model.name,
        "weights_sha256": weights_sha256(model)[:16],
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": f"{cpu_name()}, {cpu_features()}",
        "cores": num_cores(),
        "threads": options.threads,
        "cores_busy_elsewhere": max((each["cores_busy_elsewhere"] for each in ran), default=0.0),
        "versions": {
            "python": platform.python_version(),
            "gea": version("gea-core"),
            **{each["engine"]: each["version"] for each in ran},
        },
        "how": {f"{each['engine']} {each['precision']}": each["how"] for each in ran},
        "profiles": {each.name: f"{each.prompt_tokens} + {each.max_tokens}" for each in options.profiles},
        "sampling": "greedy, equally many tokens for everybody, all requests handed over at once",
        "runs": f"up to {options.repeats} in turns; none begins after {options.limit_s:g} s; one of more than that is "
        "broken off and reckoned to its end at its own pace (is_reckoned)",
        "memory": "high-water marks of the process; serving_… from when it was loaded; …_model_mb without what "
        "importing took",
        "itl": "gap between two deliveries to the reader, of one token or several",
        "disturbed": sorted(_name(each) for each in ran if each["cores_busy_elsewhere"] > DISTURBED_CORES),
        "reckoned": sorted(_name(each) for each in ran if each["is_reckoned"]),
        "left_out": _left_out(options, results),
    }


def _left_out(options: EngineOptions, results: Sequence[dict[str, Any]]) -> list[str]:
    skipped = [f"{_name(each)}: {each['skipped']}" for each in results if "skipped" in each]
    if EngineName.LLAMA_CPP not in options.engines:
        skipped.append("llama_cpp: not importable in the peers' Python, or not asked for")
    return skipped


def _name(result: dict[str, Any]) -> str:
    cell = f"{result['workload']} {result['profile']} at {result['concurrency']}"
    return f"{result['engine']} {result['precision']}, {cell}"


def weights_sha256(model: Path) -> str:
    """Return a hash over the weight files of a model folder."""
    digest = hashlib.sha256()
    for file in sorted(model.glob("*.safetensors")):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()


def cpu_name() -> str:
    """Return what the CPU calls itself."""
    lines = CPU_INFO.read_text().splitlines() if CPU_INFO.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def cpu_features() -> str:
    """Return the instruction sets that matter here."""
    text = CPU_INFO.read_text() if CPU_INFO.exists() else ""
    flags = set(next((line for line in text.splitlines() if line.startswith("flags")), "").split())
    known = ("avx2", "fma", "f16c", "avx512f", "avx512_vnni", "avx_vnni", "amx_int8")
    return " ".join(name for name in known if name in flags) or "no instruction sets told"
