"""The benches of the generation engine: speed beside its peers, memory, and what precision costs in quality."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from ops.commands.options import Json
from ops.terminal import emit_json, run

if TYPE_CHECKING:
    from rich.table import Table

    from ops.bench.engine.options import EngineName, EngineOptions
    from workers.generation.engine.settings import Backend

Concurrency = Annotated[str | None, typer.Option("--concurrency", help="Requests at once; 1,8,32, quick 1,8.")]
Precisions = Annotated[
    str | None, typer.Option("--precision", help="Ours: fp32, bf16, fp16, int8. By default fp32,int8, quick int8.")
]
Profiles = Annotated[str, typer.Option("--profile", help="Prompt and answer: short, 512/128, 2048/512.")]
Workloads = Annotated[str | None, typer.Option("--workload", help="plain, retrieval. By default both, quick plain.")]
Engines = Annotated[
    str | None,
    typer.Option(
        "--engines", help="gea, transformers_generate_batch, transformers_generate, llama_cpp. By default all."
    ),
]
LlamaPrecisions = Annotated[str, typer.Option("--llama", help="Number formats of llama.cpp: q4_1, q8_0.")]
Repeats = Annotated[int | None, typer.Option("--repeat", min=1, max=50, help="Runs of each, in turns; 3, quick 1.")]
Limit = Annotated[
    float | None, typer.Option("--limit", min=1, max=3_600, help="Seconds for one engine in one cell; 12, quick 4.")
]
Threads = Annotated[int | None, typer.Option("--threads", min=1, max=256, help="Of each engine; one a core.")]
Quick = Annotated[bool, typer.Option("--quick", help="Less of everything, in about two minutes.")]
Model = Annotated[Path | None, typer.Option("--model", exists=True, file_okay=False, help="A model folder.")]
Out = Annotated[Path | None, typer.Option("--out", file_okay=False, help="Folder for the plots (SVG, PNG).")]
Budget = Annotated[int, typer.Option("--budget", min=16, max=1 << 20, help="MiB of the cache.")]
Tokens = Annotated[int, typer.Option("--tokens", min=64, max=100_000, help="Of the text, at most all of it.")]
PeersPython = Annotated[
    Path | None,
    typer.Option("--peers-python", help="The Python that has llama-cpp-python; by default .venv-bench/bin/python."),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Defaults:
    """What is measured where the options leave it open."""

    concurrency: str
    precision: str
    workload: str
    repeats: int
    limit_s: float


FULL = _Defaults(concurrency="1,8,32", precision="fp32,int8", workload="plain,retrieval", repeats=3, limit_s=12.0)
QUICK = _Defaults(concurrency="1,8", precision="int8", workload="plain", repeats=1, limit_s=4.0)


def engine(
    concurrency: Concurrency = None,
    precision: Precisions = None,
    profile: Profiles = "short",
    workload: Workloads = None,
    engines: Engines = None,
    llama: LlamaPrecisions = "q4_1",
    repeats: Repeats = None,
    limit: Limit = None,
    threads: Threads = None,
    quick: Quick = False,
    model: Model = None,
    peers_python: PeersPython = None,
    as_json: Json = False,
) -> None:
    """Measure the engine beside transformers (both of its ways) and llama.cpp: same weights, same prompts, same run.

    Each of them is a process of its own. llama.cpp takes part where llama-cpp-python can be imported.
    """
    from ops.bench.engine.options import (
        GGUF_PRECISIONS,
        PROFILES,
        EngineOptions,
        Workload,
        gea_precisions,
        num_cores,
        read_concurrency,
        read_list,
    )

    defaults = QUICK if quick else FULL
    takes_part, python = _who(engines, peers_python)
    options = EngineOptions(
        engines=takes_part,
        precisions=read_list("--precision", precision or defaults.precision, gea_precisions()),
        workloads=read_list("--workload", workload or defaults.workload, {str(each): each for each in Workload}),
        profiles=read_list("--profile", profile, PROFILES),
        concurrency=read_concurrency(concurrency or defaults.concurrency),
        repeats=repeats or defaults.repeats,
        limit_s=limit or defaults.limit_s,
        threads=threads or num_cores(),
        peers_python=python,
        llama_precisions=read_list("--llama", llama, {each: each for each in GGUF_PRECISIONS}),
        has_extras=not quick,
    )
    _run_engine(options, model, as_json=as_json)


def _who(engines: str | None, peers_python: Path | None) -> tuple[tuple[EngineName, ...], Path | None]:
    """Return who takes part, and the Python of llama.cpp. It is left out, with a word, where nobody asked for it."""
    from ops.bench.engine.models import HOW_TO_GET_LLAMA, find_llama_python
    from ops.bench.engine.options import EngineName, read_list

    chosen = read_list("--engines", engines or ",".join(EngineName), {str(name): name for name in EngineName})
    if EngineName.LLAMA_CPP not in chosen:
        return chosen, None
    python = find_llama_python(peers_python, is_asked=engines is not None)
    if python is None:
        text = f"! llama.cpp is left out, llama-cpp-python is not there: {HOW_TO_GET_LLAMA}"
        Console(stderr=True, highlight=False).print(text, style="yellow", markup=False)
        chosen = tuple(name for name in chosen if name is not EngineName.LLAMA_CPP)
    return chosen, python


def _run_engine(options: EngineOptions, model: Path | None, *, as_json: bool) -> None:
    from ops.bench.engine.report import tables
    from ops.bench.engine.run import run_engine
    from ops.embedded import language_model_folder
    from streams.telemetry import configure_logging

    configure_logging("error")
    with _progress() as say:
        found = run(run_engine(options, model or language_model_folder(), say))
    _show(tables(found), as_json=as_json)
    if disturbed := found["conditions"]["disturbed"]:
        text = f"! not to be relied on: something else was busy beside {len(disturbed)} of the runs; see the conditions"
        Console(stderr=True, highlight=False).print(text, style="yellow", markup=False)
    if as_json:
        emit_json(found)


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Give what tells a person on stderr how far things are: in place on a terminal, else line by line."""
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:

        def say(text: str) -> None:
            status.update(text)
            if not console.is_terminal:
                console.print(text, style="dim", markup=False)

        yield say


def _show(tables: list[Table], *, as_json: bool) -> None:
    console = Console(stderr=as_json, highlight=False)
    for table in tables:
        console.print(table)


def memory(budget: Budget = 256, out: Out = None, model: Model = None, as_json: Json = False) -> None:
    """Measure what memory goes into: keys and values against a contiguous cache, a fixed budget, waste, weights."""
    from ops.bench.engine.models import language_gguf
    from ops.bench.memory import MemoryOptions, run_memory
    from ops.bench.memory_report import check_plots, save_plots, tables
    from ops.embedded import language_model_folder
    from streams.telemetry import configure_logging

    configure_logging("error")
    if out is not None:
        check_plots()
    options = MemoryOptions(
        folder=model or language_model_folder(),
        backend=_backend(),
        more_files=() if model else (language_gguf(),),
        budget_bytes=budget << 20,
    )
    with _progress() as say:
        found = run_memory(options, say)
    if out is not None:
        found["plots"] = [str(file) for file in save_plots(found, out)]
    _show(tables(found), as_json=as_json)
    if as_json:
        emit_json(found)


def quality(tokens: Tokens = 4_096, threads: Threads = None, model: Model = None, as_json: Json = False) -> None:
    """Measure what number formats cost: perplexity on a fixed text, and whether int8 depends on its batch."""
    from ops.bench.engine.options import num_cores
    from ops.bench.quality import QualityOptions, run_quality
    from ops.bench.quality_report import tables
    from ops.embedded import language_model_folder
    from streams.telemetry import configure_logging

    configure_logging("error")
    folder = model or language_model_folder()
    options = QualityOptions(folder=folder, backend=_backend(), max_tokens=tokens, threads=threads or num_cores())
    with _progress() as say:
        found = run(run_quality(options, say))
    _show(tables(found), as_json=as_json)
    if as_json:
        emit_json(found)


def _backend() -> Backend:
    """Return what runs a model of the Llama family here."""
    from workers.generation.engine.kernels import load_library
    from workers.generation.engine.settings import Backend

    return Backend.NATIVE if load_library() is not None else Backend.TORCH
