"""Benches: each starts what it measures, prints its conditions, and stops everything it started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from ops.commands.options import Json
from ops.errors import CommandError
from ops.terminal import Reporter, emit_json, run

if TYPE_CHECKING:
    from ops.bench.chaos.result import RoundResult
    from ops.bench.chaos.run import ChaosOptions

app = typer.Typer(help="Benches: each starts what it measures and stops it.", no_args_is_help=True)

ENGINES = ("fake", "model")


def chaos(
    kills: Annotated[int, typer.Option("--kills", min=1, max=100_000, help="How many workers are killed.")] = 100,
    engine: Annotated[str, typer.Option("--engine", help="fake (scripted texts) or model.")] = "fake",
    workers: Annotated[int, typer.Option("--workers", min=2, max=32, help="Workers of generation.")] = 3,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Requests and faults follow from it.")] = 1,
    checkpoint: Annotated[
        Path | None,
        typer.Option("--checkpoint", dir_okay=False, help="Keep progress here; go on from it if it exists."),
    ] = None,
    overlap: Annotated[bool, typer.Option("--overlap/--no-overlap", help="Kills that overlap.")] = True,
    membership: Annotated[bool, typer.Option("--membership/--no-membership", help="Workers join and leave.")] = True,
    broker: Annotated[bool, typer.Option("--broker/--no-broker", help="Kafka is restarted and killed.")] = True,
    redis: Annotated[bool, typer.Option("--redis/--no-redis", help="Redis freezes and forgets.")] = True,
    proxy: Annotated[bool, typer.Option("--proxy/--no-proxy", help="Connections are cut and slowed.")] = True,
    production_gap: Annotated[
        bool, typer.Option("--production-gap/--no-production-gap", help="Also measure at production defaults.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Kill workers under load, spoil broker, Redis and network, then read the whole log: nothing lost, nothing twice.

    Exits with 1 if anything was lost, doubled, altered or leaked.
    """
    switches = {"overlap": overlap, "membership": membership, "broker": broker, "redis": redis, "proxy": proxy}
    from ops.bench.chaos.result import HARMS

    options = _options(kills, engine, workers, seed, checkpoint, switches, production_gap)
    reporter = Reporter()
    found = run(_run(options, reporter))
    _show(found, Console(stderr=as_json, highlight=False))
    harmed = [f"{found[key]} {key}" for key in HARMS if found[key]]
    if harmed:
        details = tuple(found["problems"])
        raise CommandError(f"chaos: {', '.join(harmed)}", code="promise_broken", details=details, report=found)
    if as_json:
        emit_json(found)


def _options(
    kills: int,
    engine: str,
    workers: int,
    seed: int,
    checkpoint: Path | None,
    switches: dict[str, bool],
    production_gap: bool,
) -> ChaosOptions:
    from ops.bench.chaos.faults import FaultGroup
    from ops.bench.chaos.run import ChaosOptions
    from ops.bench.chaos.stack import Size
    from ops.embedded import language_model_folder
    from workers.settings import EngineKind

    if engine not in ENGINES:
        raise CommandError(f"--engine: {engine!r} is not known: {', '.join(ENGINES)}")
    is_model = engine == "model"
    size = Size(
        engine=EngineKind.LOCAL if is_model else EngineKind.FAKE,
        model=language_model_folder() if is_model else None,
        num_generation=workers,
    )
    return ChaosOptions(
        num_kills=kills,
        seed=seed,
        size=size,
        groups=frozenset(FaultGroup(name) for name, is_on in switches.items() if is_on),
        has_production_gap=production_gap,
        checkpoint=checkpoint,
    )


async def _run(options: ChaosOptions, reporter: Reporter) -> dict[str, Any]:
    from ops.bench.chaos.run import run_chaos

    console = Console(stderr=True, highlight=False)
    last = ""

    def told(result: RoundResult) -> None:
        harmed = f"{result.lost} lost, {result.duplicated} doubled, {result.altered} altered"
        reporter.step(f"{result.kills} kills", f"{result.requests} requests, {harmed}", result.seconds)

    with console.status("starting Kafka, Redis and workers") as status:

        def say(text: str) -> None:
            nonlocal last
            if text != last:
                status.update(text)
                if not console.is_terminal:
                    console.print(text, style="dim")
            last = text

        return await run_chaos(options, say, told)


def _show(found: dict[str, Any], console: Console) -> None:
    table = Table("what", "figure")
    for key in ("kills", "requests", "lost", "duplicated", "altered", "leaked_blocks", "leaked_tasks", "resets"):
        table.add_row(key, str(found[key]))
    for key in ("recovery_ms", "recovery_undisturbed_ms", "gap_ms", "production_gap_ms"):
        if key in found:
            table.add_row(key, ", ".join(f"{name} {value}" for name, value in found[key].items()))
    table.add_row("faults", ", ".join(f"{name} {count}" for name, count in found["faults"].items()))
    table.add_row("conditions", ", ".join(f"{name} {value}" for name, value in found["conditions"].items()))
    console.print(table)
    for line in found["loose_ends"]:
        console.print(f"! {line}", style="yellow", markup=False)


def pipeline(
    requests: Annotated[int, typer.Option("--requests", min=1, max=1_000_000, help="Requests of the load.")] = 1_000,
    alone: Annotated[int, typer.Option("--alone", min=10, max=10_000, help="Requests on the idle stack.")] = 100,
    repeats: Annotated[int, typer.Option("--repeats", min=1, max=50, help="Runs of each entrant and work.")] = 3,
    window: Annotated[float, typer.Option("--window", min=0.5, max=60, help="Seconds that a run counts.")] = 2.0,
    peers: Annotated[bool, typer.Option("--peers/--no-peers", help="FastStream and Quix Streams beside ours.")] = True,
    peers_python: Annotated[
        Path | None, typer.Option("--peers-python", help="The Python that has them; by default .venv-bench/bin/python.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measure the pipeline with a scripted engine on a real Kafka: what it carries, what Kafka adds, and its peers.

    All of them get the same items of 0, 10, 100 and 500 ms of work, each in one process, at least once.
    """
    from ops.bench.pipeline import PipelineOptions, find_peers, run_pipeline
    from ops.bench.pipeline_report import tables
    from streams.telemetry import configure_logging

    configure_logging("error")  # a log line for each request would be most of what the stages in process cost

    options = PipelineOptions(
        peers_python=find_peers(peers_python) if peers else None,
        num_requests=requests,
        num_alone=alone,
        repeats=repeats,
        window_s=window,
    )
    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:
        found = run(run_pipeline(options, status.update))
    shown = Console(stderr=as_json, highlight=False)
    for table in tables(found):
        shown.print(table)
    if as_json:
        emit_json(found)
